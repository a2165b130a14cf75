// CANN's profiler, which records nothing: torch_npu's starts and stops it, and finds no data to analyze. While it runs,
// torch_npu asks the driver's library, libascend_hal.so, for the device's clock.
#include <cstdint>
#include <cstdlib>

#include "acl/acl_prof.h"

extern "C" {

aclError aclprofInit(const char*, size_t) { return ACL_SUCCESS; }
aclError aclprofFinalize() { return ACL_SUCCESS; }
aclError aclprofStart(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofStop(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofWarmup(const aclprofConfig*) { return ACL_SUCCESS; }
aclError aclprofSetConfig(aclprofConfigType, const char*, size_t) { return ACL_SUCCESS; }
aclError aclprofMarkEx(const char*, size_t, aclrtStream) { return ACL_SUCCESS; }

aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, aclprofAicoreMetrics, const aclprofAicoreEvents*, uint64_t) {
  return static_cast<aclprofConfig*>(std::calloc(1, 64));
}

aclError aclprofDestroyConfig(const aclprofConfig* config) {
  std::free(const_cast<aclprofConfig*>(config));
  return ACL_SUCCESS;
}

int halGetAPIVersion(int* version) {
  *version = 0;  // without a clock of the device
  return 0;
}

int halGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t* value) {
  *value = 0;
  return 0;
}

}  // extern "C"
