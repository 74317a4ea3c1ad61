#include "src/launch/exit.hpp"

#include <dtensor/base/say.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <unistd.h>

namespace dtensor::detail {

namespace {

void end_at_once(int status, void* rank) {
  say("dtensor: rank {} called exit({}) while other ranks are threads of this process, which ends at once: destructors of static objects "
      "and functions of atexit are left out; hint: return from the function that dt::launch runs, or throw\n",
      reinterpret_cast<intptr_t>(rank), status);
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
}

// exit() destroys the thread's own objects first, and then calls what was registered last. The stack stays: no ExitWatch is destroyed.
struct OfThread {
  intptr_t rank = -1;
  ~OfThread() {
    if (rank >= 0) on_exit(end_at_once, reinterpret_cast<void*>(rank));
  }
};

thread_local OfThread of_thread;

}  // namespace

ExitWatch::ExitWatch(int rank) { of_thread.rank = rank; }
ExitWatch::~ExitWatch() { of_thread.rank = -1; }

}  // namespace dtensor::detail
