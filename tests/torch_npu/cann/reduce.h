#pragma once
#include <cstddef>
#include <cstdint>

#include "acl/acl_base.h"
#include "third_party/hccl/inc/hccl/hccl_types.h"

// Bytes of an element; 0 for types that the stub does not carry.
size_t width_of(HcclDataType type);

// Whether HCCL reduces the type.
bool reduces(HcclDataType type);

// into = into op with, elementwise; false where HCCL does not reduce the type.
bool reduce(void* into, const void* with, size_t count, HcclDataType type, HcclReduceOp op);
