"""Hardware with round numbers, so that a timeline can be worked out by hand: a byte takes a second, and so on."""

import dataclasses

from fsdptoys.device.profile import AttentionKind, Hardware, Quantity

ATTENTION = {"cuda": AttentionKind.flash, "npu": AttentionKind.npu, "cpu": AttentionKind.cpu}


def imagined_hardware(device_type: str = "cuda", **values: float) -> Hardware:
    """One FLOP/s, one byte a second everywhere, no latencies and no host time; two devices in a machine.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        values: fields that differ.
    """
    numbers = {field.name: 1.0 for field in dataclasses.fields(Hardware) if field.type is Quantity}
    numbers |= {name: 0.0 for name in numbers if name.endswith("_seconds")}
    numbers |= {"devices_per_node": 2.0, "cpu_adam_parameters_per_second": 1.0} | values
    return Hardware(
        name="imagined",
        title="Imagined",
        device_type=device_type,
        attention=ATTENTION[device_type],
        matches=(),
        peak_flops={"bfloat16": Quantity(1.0, "imagined"), "float32": Quantity(0.5, "imagined")},
        **{name: Quantity(float(value), "imagined") for name, value in numbers.items()},  # type: ignore[arg-type]
    )
