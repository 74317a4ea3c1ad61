// NCCL's functions among ranks that are threads, on the host memory of fake_cuda.hpp, as non-blocking communicators have them: calls are
// enqueued on streams, and a collective waits there until every rank has come or its communicator is aborted. Ranks that do not call alike
// wait for ever, as with the real one.
#include "tests/comm/nccl/fake_nccl.hpp"

#include "src/comm/reduce.hpp"
#include "tests/comm/nccl/fake_cuda.hpp"

#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce, send, recv };

struct Op {
  Kind kind;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // or the peer
  bool alike(const Op& other) const {
    return kind == other.kind && count == other.count && type == other.type && op == other.op && root == other.root;
  }
};

c10::ScalarType dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return c10::ScalarType::Char;
    case ncclInt32: return c10::ScalarType::Int;
    case ncclInt64: return c10::ScalarType::Long;
    case ncclFloat16: return c10::ScalarType::Half;
    case ncclBfloat16: return c10::ScalarType::BFloat16;
    case ncclFloat32: return c10::ScalarType::Float;
    case ncclFloat64: return c10::ScalarType::Double;
    default: return c10::ScalarType::Byte;
  }
}

dtensor::ReduceOp op_of(ncclRedOp_t op) {
  switch (op) {
    case ncclProd: return dtensor::ReduceOp::product;
    case ncclMax: return dtensor::ReduceOp::max;
    case ncclMin: return dtensor::ReduceOp::min;
    case ncclAvg: return dtensor::ReduceOp::avg;
    default: return dtensor::ReduceOp::sum;
  }
}

size_t size_of(const Op& op) { return c10::elementSize(dtype_of(op.type)); }

// A collective, or a message, whose ranks come one after the other.
struct Meeting {
  std::map<int, Op> ops;
  bool done = false;
};

void reduce_into(void* out, const std::map<int, Op>& ops, size_t begin, size_t count) {
  const auto& first = ops.begin()->second;
  std::vector<const void*> inputs;
  for (const auto& [rank, op] : ops) inputs.push_back(static_cast<const char*>(op.in) + begin * size_of(op));
  dtensor::comm::reduce(dtype_of(first.type), op_of(first.op), out, inputs, static_cast<int64_t>(count));
}

void perform(Meeting& meeting) {
  const auto& ops = meeting.ops;
  const auto& first = ops.begin()->second;
  const auto bytes = first.count * size_of(first);
  if (first.kind == Kind::all_reduce) {
    std::vector<char> sum(bytes);
    reduce_into(sum.data(), ops, 0, first.count);
    for (const auto& [rank, op] : ops) std::memcpy(op.out, sum.data(), bytes);
  } else if (first.kind == Kind::reduce_scatter) {
    for (const auto& [rank, op] : ops) reduce_into(op.out, ops, rank * first.count, first.count);
  } else if (first.kind == Kind::reduce) {
    reduce_into(ops.at(first.root).out, ops, 0, first.count);
  } else if (first.kind == Kind::broadcast) {
    for (const auto& [rank, op] : ops) std::memmove(op.out, ops.at(first.root).in, bytes);
  } else {
    for (const auto& [to, target] : ops) {
      for (const auto& [from, source] : ops) std::memmove(static_cast<char*>(target.out) + from * bytes, source.in, bytes);
    }
  }
}

// What the ranks of a communicator share.
struct Clique {
  explicit Clique(int size) : size(size) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  std::map<uint64_t, Meeting> collectives;                      // by number
  std::map<std::pair<int, int>, std::deque<Op>> sends;          // by (from, to)
  std::map<std::pair<int, int>, uint64_t> received;             // how many
  std::set<std::array<int, 3>> came;                            // (from, to, which of them): to its first message, where the two connect
  std::map<uint64_t, std::shared_ptr<Clique>> children;         // by number of the split

  // Whether each rank that this one has messages with has come to its own end of them.
  bool is_connected(int rank) const {
    return std::ranges::all_of(came, [&](const std::array<int, 3>& end) {
      const auto [from, to, who] = end;
      return who != rank || came.contains({from, to, from + to - who});
    });
  }

  // Nobody uses its memory any more.
  void leave(int rank) {
    for (auto& [number, meeting] : collectives) meeting.ops.erase(rank);
    for (auto& [ends, queue] : sends) {
      if (ends.first == rank) queue.clear();
    }
  }
};

std::mutex registry_mutex;
std::map<uint64_t, std::shared_ptr<Clique>> registry;
uint64_t next_id = 1;
std::map<std::string, int> calls;
std::atomic<bool> is_broken{false};

void count(const char* name) {
  std::lock_guard lock(registry_mutex);
  ++calls[name];
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  int device = dtensor_tests::current_fake_device();
  uint64_t calls = 0, splits = 0;
  std::map<int, uint64_t> messages{};  // how many were sent, by peer, and received, by -1 - peer
};

namespace {

// The calls of a group, which run together on one stream.
struct Group {
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  std::vector<Op> ops;
  int depth = 0;
};
thread_local Group group;

struct Step {
  Op op;
  uint64_t number;  // of the collective, or of the message to that peer
};

bool post(Clique& clique, int rank, const Step& step) {
  auto& meeting = clique.collectives[step.number];
  if (!meeting.ops.empty() && !meeting.ops.begin()->second.alike(step.op)) return false;
  meeting.ops[rank] = step.op;
  if (static_cast<int>(meeting.ops.size()) < clique.size) return true;
  perform(meeting);
  meeting.done = true;
  return true;
}

bool is_over(Clique& clique, int rank, const Step& step) {
  if (step.op.kind == Kind::send) return clique.received[{rank, step.op.root}] > step.number;
  if (step.op.kind != Kind::recv) return clique.collectives[step.number].done;
  auto& queue = clique.sends[{step.op.root, rank}];
  if (clique.received[{step.op.root, rank}] > step.number) return true;
  if (queue.empty() || queue.front().count != step.op.count) return false;
  std::memcpy(step.op.out, queue.front().in, step.op.count * size_of(step.op));
  queue.pop_front();
  ++clique.received[{step.op.root, rank}];
  return true;
}

void run(const std::shared_ptr<Clique>& clique, int rank, const std::shared_ptr<std::atomic<bool>>& aborted,
         const std::vector<Step>& steps) {
  std::unique_lock lock(clique->mutex);
  for (const auto& step : steps) {
    if (step.op.kind == Kind::send) clique->sends[{rank, step.op.root}].push_back(step.op);
    if (step.op.kind != Kind::send && step.op.kind != Kind::recv) post(*clique, rank, step);
  }
  std::vector<Step> left = steps;
  for (;;) {
    std::erase_if(left, [&](const Step& step) { return is_over(*clique, rank, step); });
    clique->changed.notify_all();
    if (left.empty() || *aborted) break;
    clique->changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  if (*aborted) clique->leave(rank);
}

ncclResult_t enqueue(const char* name, const Op& op, ncclComm_t comm, cudaStream_t stream) {
  count(name);
  if (op.count == 0 || (group.comm && (group.comm != comm || group.stream != stream))) return ncclInvalidUsage;
  ncclGroupStart();
  group.comm = comm;
  group.stream = stream;
  group.ops.push_back(op);
  return ncclGroupEnd();
}

ncclResult_t join(ncclComm_t* result, std::shared_ptr<Clique> clique, int rank) {
  {
    std::lock_guard lock(clique->mutex);
    ++clique->joined;
  }
  *result = new ncclComm{std::move(clique), rank};
  return ncclInProgress;
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(registry_mutex);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &next_id, sizeof next_id);
  ++next_id;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  count("CommInitRankConfig");
  if (config->blocking != 0) return ncclInvalidArgument;
  uint64_t number = 0;
  std::memcpy(&number, &id, sizeof number);
  std::lock_guard lock(registry_mutex);
  auto& clique = registry[number];
  if (!clique) clique = std::make_shared<Clique>(size);
  return join(comm, clique, rank);
}

// The child is there at once here, and the parent is not in progress.
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm, ncclConfig_t*) {
  count("CommSplit");
  if (color != 0 || key != parent->rank) return ncclInvalidArgument;
  std::shared_ptr<Clique> child;
  {
    std::lock_guard lock(parent->clique->mutex);
    auto& slot = parent->clique->children[parent->splits++];
    if (!slot) slot = std::make_shared<Clique>(parent->clique->size);
    child = slot;
  }
  join(comm, child, parent->rank);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  std::lock_guard lock(comm->clique->mutex);
  const bool ready = comm->clique->joined == comm->clique->size && comm->clique->is_connected(comm->rank);
  *state = is_broken ? ncclRemoteError : ready ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  count("CommDestroy");
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  count("CommAbort");
  *comm->aborted = true;
  comm->clique->changed.notify_all();
  dtensor_tests::synchronize_fake_device(comm->device);  // as it frees memory, which waits for the kernels of all communicators
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, size_t, void** handle) {
  count("CommRegister");
  *handle = memory;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  count("CommDeregister");
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "an error of the test's";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group.depth > 0 || group.ops.empty()) return ncclSuccess;
  auto* comm = group.comm;
  std::vector<Step> steps;
  std::unique_lock lock(comm->clique->mutex);
  for (const auto& op : group.ops) {
    const bool message = op.kind == Kind::send || op.kind == Kind::recv;
    if (op.kind == Kind::send) comm->clique->came.insert({comm->rank, op.root, comm->rank});
    if (op.kind == Kind::recv) comm->clique->came.insert({op.root, comm->rank, comm->rank});
    const int counter = op.kind == Kind::recv ? -1 - op.root : op.root;  // both directions apart
    steps.push_back({op, message ? comm->messages[counter]++ : comm->calls++});
  }
  lock.unlock();
  auto* stream = reinterpret_cast<dtensor_tests::FakeStream*>(group.stream);
  group = {};
  stream->add([clique = comm->clique, rank = comm->rank, aborted = comm->aborted, steps] { run(clique, rank, aborted, steps); });
  return ncclInProgress;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue("AllReduce", {Kind::all_reduce, in, out, count, type, op}, comm, stream);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return enqueue("AllGather", {Kind::all_gather, in, out, count, type}, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return enqueue("ReduceScatter", {Kind::reduce_scatter, in, out, count, type, op}, comm, stream);
}
ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return enqueue("Reduce", {Kind::reduce, in, out, count, type, op, root}, comm, stream);
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return enqueue("Broadcast", {Kind::broadcast, in, out, count, type, ncclSum, root}, comm, stream);
}
ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return enqueue("Send", {Kind::send, in, nullptr, count, type, ncclSum, peer}, comm, stream);
}
ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return enqueue("Recv", {Kind::recv, nullptr, out, count, type, ncclSum, peer}, comm, stream);
}

namespace dtensor_tests {

int calls_of_nccl(const std::string& name) {
  std::lock_guard lock(registry_mutex);
  return calls[name];
}

void forget_calls_of_nccl() {
  std::lock_guard lock(registry_mutex);
  calls.clear();
}

void break_nccl(bool broken) { is_broken = broken; }

}  // namespace dtensor_tests
