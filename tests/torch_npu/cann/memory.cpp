// Device memory that is host memory, counted against a capacity, and copies that check which side they are given.
//
// Expandable segments reserve addresses first and map memory into them later: the addresses are a mapping without
// access, and to map is to allow it.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "acl/acl.h"
#include "stub.h"

namespace {

constexpr size_t ALIGNMENT = 512;
constexpr size_t GRANULARITY = 2ull << 20;

struct Range {
  size_t bytes;
  int32_t device;
};

struct Physical {
  size_t bytes;
  int32_t device;
};

std::mutex lock;
std::map<const char*, Range> device_ranges, host_ranges, reserved;
size_t used[MOST_DEVICES];
thread_local char message[512];

// STUB_DEVICE_MIB of the environment; 16 GiB without it.
size_t capacity() {
  const char* value = std::getenv("STUB_DEVICE_MIB");
  return value ? static_cast<size_t>(std::atoll(value)) << 20 : 16ull << 30;
}

int32_t device_or_first() { return stub_current_device() == NO_DEVICE ? 0 : stub_current_device(); }

bool take(int32_t device, size_t bytes) {
  if (used[device] + bytes > capacity()) return false;
  used[device] += bytes;
  return true;
}

bool covers(const std::map<const char*, Range>& ranges, const void* pointer, size_t bytes) {
  auto at = ranges.upper_bound(static_cast<const char*>(pointer));
  // Mapped pieces of a segment are neighbors, and a tensor may lie over several.
  auto *first = static_cast<const char*>(pointer), *last = first + bytes;
  if (at == ranges.begin()) return false;
  --at;
  while (at != ranges.end() && at->first <= first && first < at->first + at->second.bytes) {
    first = at->first + at->second.bytes;
    if (last <= first) return true;
    ++at;
  }
  return false;
}

bool on_device(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  return covers(device_ranges, pointer, bytes);
}

aclError copy(void* to, size_t most, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes == 0) return ACL_SUCCESS;
  if (bytes > most) return stub_refuse(ACL_ERROR_INVALID_PARAM, "copy of %zu bytes into %zu", bytes, most);
  bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  bool to_is_device = on_device(to, bytes), from_is_device = on_device(from, bytes);
  if (kind != ACL_MEMCPY_DEFAULT && (to_device != to_is_device || from_device != from_is_device))
    return stub_refuse(ACL_ERROR_INVALID_PARAM, "copy of kind %d from %p (device memory: %d) to %p (%d), %zu bytes",
                       static_cast<int>(kind), from, from_is_device, to, to_is_device, bytes);
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

}  // namespace

aclError stub_refuse(aclError code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "CANN stub: %s\n", message);
  return code;
}

const char* stub_last_message() { return message; }

extern "C" {

// Device memory in one piece.

aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> held(lock);
  int32_t device = device_or_first();
  if (!take(device, bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  if (posix_memalign(pointer, ALIGNMENT, bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  device_ranges[static_cast<char*>(*pointer)] = {bytes, device};
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, bytes, policy);
}

aclError aclrtFree(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto at = device_ranges.find(static_cast<char*>(pointer));
  if (at == device_ranges.end()) return stub_refuse(ACL_ERROR_INVALID_PARAM, "free of what was never allocated");
  used[at->second.device] -= at->second.bytes;
  device_ranges.erase(at);
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> held(lock);
  *total = capacity();
  *free_bytes = *total - used[device_or_first()];
  return ACL_SUCCESS;
}

// Device memory in pieces that are mapped into reserved addresses.

aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t, void*, uint64_t) {
  // Of huge pages' alignment, as the allocator asks of CANN.
  char* start = static_cast<char*>(mmap(nullptr, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (start == MAP_FAILED) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  char* aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(start) + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
  if (aligned > start) munmap(start, aligned - start);
  munmap(aligned + bytes, start + GRANULARITY - aligned);
  std::lock_guard<std::mutex> held(lock);
  reserved[aligned] = {bytes, device_or_first()};
  *pointer = aligned;
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto at = reserved.find(static_cast<char*>(pointer));
  if (at == reserved.end()) return stub_refuse(ACL_ERROR_INVALID_PARAM, "release of what was never reserved");
  munmap(pointer, at->second.bytes);
  reserved.erase(at);
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* wanted, uint64_t) {
  std::lock_guard<std::mutex> held(lock);
  int32_t device = static_cast<int32_t>(wanted->location.id);
  if (!take(device, bytes)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{bytes, device});
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  std::lock_guard<std::mutex> held(lock);
  auto* physical = reinterpret_cast<Physical*>(handle);
  used[physical->device] -= physical->bytes;
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* pointer, size_t bytes, size_t, aclrtDrvMemHandle handle, uint64_t) {
  if (mprotect(pointer, bytes, PROT_READ | PROT_WRITE)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> held(lock);
  device_ranges[static_cast<char*>(pointer)] = {bytes, reinterpret_cast<Physical*>(handle)->device};
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  auto at = device_ranges.find(static_cast<char*>(pointer));
  if (at == device_ranges.end()) return stub_refuse(ACL_ERROR_INVALID_PARAM, "unmap of what was never mapped");
  madvise(pointer, at->second.bytes, MADV_DONTNEED);
  mprotect(pointer, at->second.bytes, PROT_NONE);
  device_ranges.erase(at);
  return ACL_SUCCESS;
}

// Host memory that is pinned.

aclError aclrtMallocHost(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, ALIGNMENT, bytes ? bytes : 1)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> held(lock);
  host_ranges[static_cast<char*>(*pointer)] = {bytes, NO_DEVICE};
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  host_ranges.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> held(lock);
  attributes->location.id = 0;
  attributes->location.type = covers(device_ranges, pointer, 1) ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : covers(host_ranges, pointer, 1) ? ACL_MEM_LOCATION_TYPE_HOST
                                                                : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

// Copies.

aclError aclrtMemcpy(void* to, size_t most, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  return copy(to, most, from, bytes, kind);
}

aclError aclrtMemcpyAsync(void* to, size_t most, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream) {
  return copy(to, most, from, bytes, kind);
}

aclError aclrtMemset(void* pointer, size_t most, int32_t value, size_t bytes) {
  if (bytes > most) return stub_refuse(ACL_ERROR_INVALID_PARAM, "%zu bytes set of %zu", bytes, most);
  std::memset(pointer, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* pointer, size_t most, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(pointer, most, value, bytes);
}

}  // extern "C"
