#include "src/dispatch/reading.hpp"

#include <algorithm>
#include <vector>

namespace dtensor::dispatch {

namespace {

struct Read {
  const c10::StorageImpl* memory;  // which the work keeps alive
  comm::WorkPtr work;
};

thread_local std::vector<Read> reads;

template <class Ended>
void forget(Ended&& ended) {
  std::erase_if(reads, ended);
  detail::anything_read = !reads.empty();
}

const c10::StorageImpl* memory_of(const at::Tensor& local) { return local.storage().unsafeGetStorageImpl(); }

}  // namespace

DTENSOR_FAST_THREAD_LOCAL bool detail::anything_read = false;

void reading(const at::Tensor& local, comm::WorkPtr work) {
  forget([](const Read& read) { return read.work->done(); });
  reads.push_back({memory_of(local), std::move(work)});
  detail::anything_read = true;
}

void no_longer_reading(const comm::WorkPtr& work) {
  if (!detail::anything_read) [[likely]] return;
  forget([&](const Read& read) { return read.work == work; });
}

void wait_for_readers(const at::Tensor& local) {
  const auto reads_it = [memory = memory_of(local)](const Read& read) { return read.memory == memory; };
  for (const auto& read : reads) {
    if (reads_it(read)) read.work->wait();
  }
  forget(reads_it);
}

void wait_for_all_readers() {
  for (const auto& read : reads) read.work->wait();
  forget([](const Read&) { return true; });
}

}  // namespace dtensor::dispatch
