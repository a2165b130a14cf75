// CANN's runtime without a device: contexts, streams that are always done, and events that are moments of the host's
// clock. Every call has done its work when it returns, so nothing here can find a missing wait.
//
// Compiled against the headers in torch_npu's wheel, so that a prototype that differs does not compile.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "stub.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Stream {
  int32_t device;
  int32_t number;
};

struct Event {
  Clock::time_point moment;
  bool recorded = false;
};

thread_local int32_t current = NO_DEVICE;
char contexts[MOST_DEVICES];
int32_t streams_made = 0;

}  // namespace

int32_t stub_device_count() {
  const char* value = std::getenv("STUB_DEVICES");
  int32_t count = value ? std::atoi(value) : 2;
  return count < MOST_DEVICES ? count : MOST_DEVICES;
}

int32_t stub_current_device() { return current; }

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclrtGetSocName() { return "Ascend910B3"; }
const char* aclGetRecentErrMsg() { return stub_last_message(); }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, "8.5.0");
  return ACL_SUCCESS;
}

// Devices and contexts: a thread has no device until it sets one, as with CANN.

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = stub_device_count();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= stub_device_count()) return ACL_ERROR_RT_INVALID_DEVICEID;
  current = device;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current == NO_DEVICE) return ACL_ERROR_RT_CONTEXT_NULL;
  *device = current;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current == NO_DEVICE) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = &contexts[current];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  current = static_cast<int32_t>(static_cast<char*>(context) - contexts);
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
  *logical = user;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = 20;  // of cores; the only attribute that torch_npu's properties show
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 1;
  return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 0;
  return ACL_SUCCESS;
}

// Streams.

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = new Stream{current, __atomic_fetch_add(&streams_made, 1, __ATOMIC_RELAXED)};
  return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }

aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* number) {
  *number = stream ? static_cast<Stream*>(stream)->number : -1;
  return ACL_SUCCESS;
}

// Events.

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  *static_cast<Event*>(event) = {Clock::now(), true};
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  auto *first = static_cast<Event*>(start), *last = static_cast<Event*>(end);
  if (!first->recorded || !last->recorded) return ACL_ERROR_INVALID_PARAM;
  *milliseconds = std::chrono::duration<float, std::milli>(last->moment - first->moment).count();
  return ACL_SUCCESS;
}

}  // extern "C"
