// The texts and checks of collective calls that transports share.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <string>
#include <string_view>

namespace dtensor::comm {

// Writes into `call` what this thread's calls are for.
void describe_purpose(CallInfo& call);

uint64_t hash_counts(Counts counts);
// The same in every process.
uint64_t hash_text(std::string_view text, uint64_t seed);

// Sends up to this size complete without the receiver, on every transport, so that two ranks may send to each other first.
constexpr int64_t kBufferedSendBytes = 64 << 10;

// "rank 1", "ranks 1, 2 and 5"
std::string rank_list(const std::vector<int>& ranks);

// The texts of what can go wrong; each names ranks, operation and sequence number.
std::string divergence(int rank, const CallInfo& call, int other_rank, const CallInfo& other);
// Of an all_to_all: in bytes, what rank `from` sends to rank `to` and what that expects.
std::string unequal_pieces(const CallInfo& call, int from, int to, int64_t sent, int64_t expected);
std::string departure(int rank, const std::string& why);
std::string failure(const CallInfo& call, const std::string& group, const std::string& why);
std::string lateness(Milliseconds deadline, const std::vector<int>& absent);
std::string lateness(const CallInfo& call, const std::string& group, Milliseconds deadline, const std::vector<int>& absent);

// Argument checks that transports share. position_in() returns the position of `rank` in `ranks`; it throws if `rank` is not in it, or if
// one of `ranks` is not in the world.
void require_cpu(Collective kind, const at::Tensor& tensor, std::string_view transport);
int position_in(const std::string& name, const std::vector<int>& ranks, int rank, int world_size);

}  // namespace dtensor::comm
