// What the files of the stub share.
#pragma once
#include <cstdint>

#include "acl/acl_base.h"

constexpr int32_t NO_DEVICE = -1;
constexpr int32_t MOST_DEVICES = 64;

// STUB_DEVICES of the environment; 2 without it.
int32_t stub_device_count();

// Of this thread.
int32_t stub_current_device();

// Remember why a call is refused, for aclGetRecentErrMsg and on stderr; returns the code.
aclError stub_refuse(aclError code, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* stub_last_message();
