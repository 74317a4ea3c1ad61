// Comparing and printing collective calls.
#include "src/comm/describe.hpp"

#include <dtensor/base/error.hpp>

#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace dtensor::comm {

namespace {

bool reduces(Collective kind) { return kind == Collective::all_reduce || kind == Collective::reduce_scatter; }

bool has_equal_sizes(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter || kind == Collective::broadcast;
}

}  // namespace

bool CallInfo::agrees_with(const CallInfo& other) const {
  if (kind != other.kind || sequence != other.sequence) return false;
  if (kind == Collective::barrier) return true;
  if (dtype != other.dtype) return false;
  if (reduces(kind) && op != other.op) return false;
  if (kind == Collective::broadcast && root != other.root) return false;
  if (has_equal_sizes(kind) && numel != other.numel) return false;
  return counts_hash == other.counts_hash && purpose == other.purpose;
}

std::string CallInfo::str() const {
  auto text = std::string(name(kind));
  if (reduces(kind)) text += fmt::format("({})", dtensor::name(op));
  if (kind == Collective::broadcast) text += fmt::format("(root {})", root);
  if (kind == Collective::send) text += fmt::format("(to {}, tag {})", root, tag);
  if (kind == Collective::recv) text += fmt::format("(from {}, tag {})", root, tag);
  text += fmt::format(" #{}", sequence);
  if (kind != Collective::barrier) text += fmt::format(" of {}[{}]", c10::toString(static_cast<c10::ScalarType>(dtype)), numel);
  if (!cause.empty()) text += fmt::format(" by {}", std::string_view(cause));
  if (!subject.empty()) text += fmt::format(" for '{}'", std::string_view(subject));
  return text;
}

static thread_local std::string_view current_subject;

Subject::Subject(std::string_view name) : outer_(std::exchange(current_subject, name)) {}
Subject::~Subject() { current_subject = outer_; }
std::string_view Subject::current() { return current_subject; }

void describe_purpose(CallInfo& call) {
  const auto cause = Cause::op(), subject = Subject::current();
  call.purpose = hash_text(subject, hash_text(cause, 0));
  call.cause = cause;
  call.subject = subject;
}

uint64_t hash_text(std::string_view text, uint64_t seed) {
  const auto mix = [](uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 32;
  };
  uint64_t hash = mix(seed, text.size());
  for (; !text.empty(); text.remove_prefix(std::min<size_t>(text.size(), 8))) {
    uint64_t word = 0;
    text.copy(reinterpret_cast<char*>(&word), sizeof word);
    hash = mix(hash, word);
  }
  return hash;
}

uint64_t hash_counts(Counts counts) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (int64_t count : counts) hash = (hash ^ static_cast<uint64_t>(count)) * 0x100000001b3ull;
  return hash;
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// The most frequent reason why one rank calls alone.
constexpr const char* kOneRankAlone = "; item(), full_tensor(), printing, saving and evaluation are for all ranks: "
                                      "call them outside of `if (rank == 0)`";

// What two calls differ in whose texts are the same.
static std::string_view hidden_difference(const CallInfo& call, const CallInfo& other) {
  if (call.str() != other.str()) return "";
  if (call.counts_hash != other.counts_hash) return ", with other lengths of the ranks' pieces";
  return call.purpose != other.purpose ? ", for another operator or parameter, whose name is cut here" : "";
}

std::string divergence(int rank, const CallInfo& call, int other_rank, const CallInfo& other) {
  const bool earlier = rank < other_rank;
  return fmt::format("the ranks diverged: rank {} called {} while rank {} called {}{}; hint: every rank of a group must make the "
                     "same calls in the same order, with matching sizes{}", earlier ? rank : other_rank,
                     earlier ? call.str() : other.str(), earlier ? other_rank : rank, earlier ? other.str() : call.str(),
                     hidden_difference(call, other), kOneRankAlone);
}

std::string unequal_pieces(const CallInfo& call, int from, int to, int64_t sent, int64_t expected) {
  const auto size = static_cast<int64_t>(c10::elementSize(static_cast<c10::ScalarType>(call.dtype)));
  const auto what = call.subject.empty() ? "" : fmt::format(" for '{}'", std::string_view(call.subject));
  return fmt::format("the ranks diverged: in {} #{}{} rank {} sends {} elements to rank {}, which expects {}; hint: a rank has to expect "
                     "what the other sends: `recv` of all_to_all and `like` of shift say what comes in, and a tensor that moves to another "
                     "mesh has the same sizes and placements on all ranks", name(call.kind), call.sequence, what, from, sent / size, to,
                     expected / size);
}

std::string departure(int rank, const std::string& why) {
  if (why.empty()) return fmt::format("rank {} has left without calling it; hint: every rank must make the call{}", rank, kOneRankAlone);
  return fmt::format("rank {} failed: {}", rank, why);
}

std::string failure(const CallInfo& call, const std::string& group, const std::string& why) {
  return fmt::format("{} in group '{}' cannot complete: {}", call.str(), group, why);
}

std::string lateness(Milliseconds deadline, const std::vector<int>& absent) {
  return fmt::format("did not complete within {} s; {}; hint: a rank is stuck, far behind (raise --deadline if that is expected), or waits "
                     "in another call for this one{}", static_cast<double>(deadline.count()) / 1000,
                     absent.empty() ? "every rank called it" : rank_list(absent) + " did not call it", kOneRankAlone);
}

std::string lateness(const CallInfo& call, const std::string& group, Milliseconds deadline, const std::vector<int>& absent) {
  return fmt::format("{} in group '{}' {}", call.str(), group, lateness(deadline, absent));
}

void require_cpu(Collective kind, const at::Tensor& tensor, std::string_view transport) {
  if (tensor.device().is_cpu()) return;
  fail(name(kind), "the {} transport moves CPU tensors; got one on {}; hint: those go over the nccl transport, with one process per "
       "GPU: dtensor-run -n N ./program --transport nccl", transport, tensor.device().str());
}

int position_in(const std::string& name, const std::vector<int>& ranks, int rank, int world_size) {
  for (int member : ranks) {
    require(member >= 0 && member < world_size, "connect", "group '{}' has a rank outside the world; got ranks [{}]; expected 0..{}",
            name, fmt::join(ranks, ", "), world_size - 1);
  }
  const auto found = std::ranges::find(ranks, rank);
  require(found != ranks.end(), "connect", "rank {} is not in group '{}'; got ranks [{}]", rank, name, fmt::join(ranks, ", "));
  return static_cast<int>(found - ranks.begin());
}

}  // namespace dtensor::comm
