"""Replays of traced rows, and how far they are from the published measurements."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from scripts.planner import published_torchtitan
from scripts.planner.published_programs import ROWS
from scripts.planner.published_torchtitan import h100

GIB = 2**30
END_BAR_GIB = 0.01
RESERVED_BARS = {"fsdp1": 0.10, "fsdp2": 0.04}
SECONDS_BAR = 0.08
OFFLOAD_SECONDS_BAR = 0.15
TORCHTITAN_RESERVED_BAR = 0.04
TORCHTITAN_SECONDS_BAR = 0.06
FITTED_ROW = "block"
HOST_ROWS = {
    ("fsdp2", "block gc chunk oo"): "latency of transfers",
    ("fsdp2", "block gc chunk co"): "AdamW on the host",
}
"""Row → the rate that is fitted to it."""
TORCHTITAN = {
    8: published_torchtitan.Published(5762, 82.4),
    128: published_torchtitan.Published(5605, 67.0),
}


def a2() -> Hardware:
    """Hardware of the first table."""
    return load_hardware("a2")


@dataclass(frozen=True)
class Finding:
    """A prediction and its published value."""

    row: str
    what: str
    published: float
    predicted: float
    bar: float
    relative: bool = True

    @property
    def error(self) -> float:
        """Relative error, or the difference in GiB."""
        difference = self.predicted - self.published
        return difference / self.published if self.relative else difference

    @property
    def met(self) -> bool:
        """Whether the error is within the bar; published values have two digits after the point."""
        return abs(self.error) <= self.bar + (0 if self.relative else 0.005)

    def cells(self) -> list[str]:
        """Cells of the table."""
        figures = [f"{self.published:.2f}", f"{self.predicted:.2f}"]
        figures += [f"{self.error:+.3f}", f"{self.bar}"]
        if self.relative:
            figures[2:] = [f"{self.error:+.1%}", f"{self.bar:.0%}"]
        return [self.row, self.what, *figures, "met" if self.met else "**missed**"]


@dataclass
class Rows:
    """Traced rows and their replays."""

    traces: dict[str, Trace]

    def replay(
        self,
        name: str,
        hardware: Hardware,
        allocator: AllocatorKind = AllocatorKind.expandable,
    ) -> Replay:
        """Replay a row; both programs asked for expandable segments."""
        return replay(
            self.traces[name],
            hardware,
            build_allocator(allocator, device_type=hardware.device_type),
        )

    def seconds(self, name: str) -> Callable[[Hardware], float]:
        """Seconds of a row's step, as a function of the hardware."""
        return lambda hardware: self.replay(name, hardware).time().step_seconds

    def fit(
        self, name: str, published: float, hardware: Hardware, parameter: str
    ) -> Hardware:
        """Fit one rate to a row's time."""
        return calibrate(
            [Case(self.seconds(name), published, name)],
            hardware,
            choose_parameters([parameter]),
        ).hardware


def classic_memory(rows: Rows) -> list[Finding]:
    """The first table: allocated at the end of a step, and reserved."""
    hardware = a2()
    findings = []
    for (strategy, name), (_, published) in ROWS.items():
        row = f"{strategy} {name}"
        if row in rows.traces:
            memory = rows.replay(row, hardware).memory()
            end = memory.end_bytes / GIB
            reserved = memory.reserved_bytes / GIB
            findings.append(
                Finding(
                    row,
                    "GiB at end",
                    published.end_gib,
                    end,
                    END_BAR_GIB,
                    relative=False,
                )
            )
            bar = RESERVED_BARS[strategy]
            findings.append(
                Finding(row, "GiB reserved", published.reserved_gib, reserved, bar)
            )
    return findings


def classic_time(rows: Rows, fit_host: bool) -> tuple[list[Finding], list[str]]:
    """The first table: step times of all rows outside the fit.

    Args:
        rows: traced.
        fit_host: whether to fit the two rates that only offload depends on.

    Returns:
        The findings; notes on fitted rates.
    """
    findings = []
    fitted = []
    for strategy in ("fsdp2", "fsdp1"):
        base = f"{strategy} {FITTED_ROW}"
        if base not in rows.traces:
            continue
        hardware = rows.fit(
            base, ROWS[strategy, FITTED_ROW][1].seconds, a2(), "compute"
        )
        used = {base}
        fitted.append(
            f"Fitted: {strategy}: {hardware.matmul_efficiency.value:.3f} of the peak in matmuls, "
            f"from “{base}”"
        )
        if fit_host and all(" ".join(key) in rows.traces for key in HOST_ROWS):
            # FSDP2's rows give both rates, on a node with FSDP2's matmul speed.
            seconds = ROWS["fsdp2", FITTED_ROW][1].seconds
            fitted_hardware = rows.fit(f"fsdp2 {FITTED_ROW}", seconds, a2(), "compute")
            for key, parameter in HOST_ROWS.items():
                fitted_hardware = rows.fit(
                    " ".join(key), ROWS[key][1].seconds, fitted_hardware, parameter
                )
                used.add(" ".join(key))
            latency = fitted_hardware.transfer_latency_seconds
            rate = fitted_hardware.cpu_adam_parameters_per_second
            hardware = dataclasses.replace(
                hardware,
                transfer_latency_seconds=latency,
                cpu_adam_parameters_per_second=rate,
            )
            if strategy == "fsdp2":
                fitted.append(
                    f"Fitted: both: {latency.value * 1e3:.2f} ms a transfer, "
                    f"{rate.value / 1e6:.0f} million parameters a second"
                )
        for (owner, name), (switches, published) in ROWS.items():
            row = f"{owner} {name}"
            if owner == strategy and row in rows.traces and row not in used:
                offload = switches.optimizer_offload or switches.cpu_offload
                bar = OFFLOAD_SECONDS_BAR if offload else SECONDS_BAR
                seconds = rows.seconds(row)(hardware)
                findings.append(
                    Finding(row, "s a step", published.seconds, seconds, bar)
                )
    return findings, fitted


def torchtitan(rows: Rows) -> tuple[list[Finding], list[str]]:
    """torchtitan's table: reserved memory, and tokens per second on the larger number of ranks."""
    findings = []
    notes = []
    for ranks, published in TORCHTITAN.items():
        row = f"torchtitan {ranks}"
        if row in rows.traces:
            reserved = rows.replay(row, h100()).memory().reserved_bytes / GIB
            native = (
                rows.replay(row, h100(), AllocatorKind.native).memory().reserved_bytes
                / GIB
            )
            bar = TORCHTITAN_RESERVED_BAR
            findings.append(
                Finding(row, "GiB reserved", published.reserved_gib, reserved, bar)
            )
            notes.append(f"{row}: {native:.2f} GiB with native segments")
            seconds = published.step_seconds
            before = rows.seconds(row)(h100())
            notes.append(
                f"{row}: {seconds:.2f} s a step, {seconds / before:.2f} times the {before:.2f} s "
                "without a fit"
            )
    few, many = (f"torchtitan {ranks}" for ranks in TORCHTITAN)
    if few in rows.traces and many in rows.traces:
        hardware = rows.fit(few, TORCHTITAN[8].step_seconds, h100(), "compute")
        share = hardware.matmul_efficiency.value
        notes.append(f"Fitted: {share:.3f} of the peak in matmuls, from “{few}”")
        predicted = TORCHTITAN[128].tokens / rows.seconds(many)(hardware)
        rate = TORCHTITAN[128].tokens_per_second
        findings.append(
            Finding(many, "tokens/s a GPU", rate, predicted, TORCHTITAN_SECONDS_BAR)
        )
    return findings, notes
