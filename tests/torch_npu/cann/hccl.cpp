// HCCL between processes of one machine, over POSIX shared memory: every rank has a slot that it writes and all read,
// and every collective is copy in, barrier, read, barrier, in pieces where it is larger than a slot.
//
// Reductions start at rank 0 and go up, so the bits do not depend on who asks. Not covered: send and receive, groups of
// calls, several machines.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>

#include "acl/acl.h"
#include "third_party/hccl/inc/hccl/hccl.h"
#include "reduce.h"
#include "stub.h"

namespace {

constexpr size_t SLOT = 32ull << 20;
constexpr size_t HEAD = 4096;

struct Shared {
  std::atomic<bool> ready;
  pthread_barrier_t barrier;
};

struct Communicator {
  Shared* shared;
  char* slots;
  uint32_t ranks, rank;
  char name[COMM_NAME_MAX_LENGTH];

  char* slot(uint32_t of) const { return slots + SLOT * of; }
  void meet() const { pthread_barrier_wait(&shared->barrier); }
};

std::atomic<int> named{0};

Communicator* of(HcclComm comm) { return static_cast<Communicator*>(comm); }

template <typename T>
char* bytes(T* pointer) {
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(pointer)));
}

HcclResult refused(const char* collective, HcclDataType type) {
  stub_refuse(ACL_ERROR_INVALID_PARAM, "%s of data type %d, which HCCL does not take", collective, static_cast<int>(type));
  return HCCL_E_NOT_SUPPORT;
}

// Call work(first, count) for pieces of a collective over so many elements, of which `most` fit at once.
void in_pieces(size_t elements, size_t most, const std::function<void(size_t, size_t)>& work) {
  for (size_t first = 0; first < elements; first += most) work(first, std::min(most, elements - first));
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  std::memset(root, 0, sizeof *root);
  std::snprintf(root->internal, sizeof root->internal, "/cann_stub.%d.%d", getpid(), named++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, HcclComm* made) {
  auto* comm = new Communicator{nullptr, nullptr, ranks, rank, ""};
  std::strncpy(comm->name, root->internal, sizeof comm->name - 1);
  int file = shm_open(comm->name, O_RDWR | O_CREAT, 0600);
  size_t size = HEAD + SLOT * ranks;
  if (file < 0 || ftruncate(file, static_cast<off_t>(size))) return HCCL_E_SYSCALL;
  void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) return HCCL_E_SYSCALL;
  comm->shared = static_cast<Shared*>(start);
  comm->slots = static_cast<char*>(start) + HEAD;
  if (rank == 0) {
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&comm->shared->barrier, &attributes, ranks);
    comm->shared->ready = true;
  }
  while (!comm->shared->ready) usleep(1000);
  comm->meet();
  if (rank == 0) shm_unlink(comm->name);  // nobody looks for the name any more, and the memory goes with the last rank
  *made = comm;
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* made) {
  return HcclCommInitRootInfo(ranks, root, rank, made);
}

HcclResult HcclCommDestroy(HcclComm comm) {
  munmap(of(comm)->shared, HEAD + SLOT * of(comm)->ranks);
  delete of(comm);
  return HCCL_SUCCESS;
}

uint32_t HcclGetCommConfigCapability() { return 0; }

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
  std::strcpy(name, of(comm)->name);
  return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream) {
  of(comm)->meet();
  return HCCL_SUCCESS;
}

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream) {
  if (!reduces(type)) return refused("all-reduce", type);
  auto* c = of(comm);
  size_t width = width_of(type);
  in_pieces(count, SLOT / width, [&](size_t first, size_t n) {
    std::memcpy(c->slot(c->rank), bytes(from) + first * width, n * width);
    c->meet();
    char* out = bytes(to) + first * width;
    std::memcpy(out, c->slot(0), n * width);
    for (uint32_t rank = 1; rank < c->ranks; rank++) reduce(out, c->slot(rank), n, type, op);
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream) {
  if (!reduces(type)) return refused("reduce", type);
  auto* c = of(comm);
  size_t width = width_of(type);
  in_pieces(count, SLOT / width, [&](size_t first, size_t n) {
    std::memcpy(c->slot(c->rank), bytes(from) + first * width, n * width);
    c->meet();
    if (c->rank == root) {
      char* out = bytes(to) + first * width;
      std::memcpy(out, c->slot(0), n * width);
      for (uint32_t rank = 1; rank < c->ranks; rank++) reduce(out, c->slot(rank), n, type, op);
    }
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream) {
  if (!reduces(type)) return refused("reduce-scatter", type);
  auto* c = of(comm);
  size_t width = width_of(type);
  in_pieces(count, SLOT / width / c->ranks, [&](size_t first, size_t n) {
    for (uint32_t rank = 0; rank < c->ranks; rank++)
      std::memcpy(c->slot(c->rank) + rank * n * width, bytes(from) + (rank * count + first) * width, n * width);
    c->meet();
    char* out = bytes(to) + first * width;
    std::memcpy(out, c->slot(0) + c->rank * n * width, n * width);
    for (uint32_t rank = 1; rank < c->ranks; rank++) reduce(out, c->slot(rank) + c->rank * n * width, n, type, op);
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream) {
  size_t width = width_of(type);
  if (!width) return refused("broadcast", type);
  auto* c = of(comm);
  in_pieces(count, SLOT / width, [&](size_t first, size_t n) {
    char* part = bytes(buffer) + first * width;
    if (c->rank == root) std::memcpy(c->slot(root), part, n * width);
    c->meet();
    if (c->rank != root) std::memcpy(part, c->slot(root), n * width);
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream) {
  size_t width = width_of(type);
  if (!width) return refused("all-gather", type);
  auto* c = of(comm);
  in_pieces(count, SLOT / width, [&](size_t first, size_t n) {
    std::memcpy(c->slot(c->rank), bytes(from) + first * width, n * width);
    c->meet();
    for (uint32_t rank = 0; rank < c->ranks; rank++)
      std::memcpy(bytes(to) + (rank * count + first) * width, c->slot(rank), n * width);
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclScatter(void* from, void* to, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream) {
  size_t width = width_of(type);
  if (!width) return refused("scatter", type);
  auto* c = of(comm);
  in_pieces(count, SLOT / width, [&](size_t first, size_t n) {
    for (uint32_t rank = 0; c->rank == root && rank < c->ranks; rank++)
      std::memcpy(c->slot(rank), bytes(from) + (rank * count + first) * width, n * width);
    c->meet();
    std::memcpy(bytes(to) + first * width, c->slot(c->rank), n * width);
    c->meet();
  });
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAllV(const void* from, const void* send_counts, const void* send_starts, HcclDataType type,
                         const void* to, const void* receive_counts, const void* receive_starts, HcclDataType,
                         HcclComm comm, aclrtStream) {
  size_t width = width_of(type);
  if (!width) return refused("all-to-all", type);
  auto* c = of(comm);
  auto *sent = static_cast<const uint64_t*>(send_counts), *sent_from = static_cast<const uint64_t*>(send_starts);
  auto *got = static_cast<const uint64_t*>(receive_counts), *got_at = static_cast<const uint64_t*>(receive_starts);
  // A slot begins with where in it each rank's part begins.
  auto* starts = reinterpret_cast<uint64_t*>(c->slot(c->rank));
  uint64_t at = c->ranks * sizeof(uint64_t);
  for (uint32_t rank = 0; rank < c->ranks; rank++) {
    if (at + sent[rank] * width > SLOT) return HCCL_E_MEMORY;
    starts[rank] = at;
    std::memcpy(c->slot(c->rank) + at, bytes(from) + sent_from[rank] * width, sent[rank] * width);
    at += sent[rank] * width;
  }
  c->meet();
  for (uint32_t rank = 0; rank < c->ranks; rank++) {
    uint64_t start = reinterpret_cast<uint64_t*>(c->slot(rank))[c->rank];
    std::memcpy(bytes(to) + got_at[rank] * width, c->slot(rank) + start, got[rank] * width);
  }
  c->meet();
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void* from, uint64_t count, HcclDataType type, const void* to, uint64_t, HcclDataType,
                        HcclComm comm, aclrtStream stream) {
  uint64_t counts[MOST_DEVICES], starts[MOST_DEVICES];
  for (uint32_t rank = 0; rank < of(comm)->ranks; rank++) counts[rank] = count, starts[rank] = rank * count;
  return HcclAlltoAllV(from, counts, starts, type, to, counts, starts, type, comm, stream);
}

}  // extern "C"
