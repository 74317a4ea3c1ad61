// Observers, which see collectives, and causes, which say what they are for. Both belong to the calling thread.
#include <dtensor/comm/record.hpp>

namespace dtensor::comm {

namespace {
thread_local Observer* innermost = nullptr;
thread_local std::string_view cause_op;
thread_local bool cause_implicit = false;
}  // namespace

const char* name(Collective kind) {
  switch (kind) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::all_to_all: return "all_to_all";
    case Collective::broadcast: return "broadcast";
    case Collective::send: return "send";
    case Collective::recv: return "recv";
    case Collective::barrier: return "barrier";
  }
  return "unknown collective";
}

Observer::Observer() : outer_(innermost) { innermost = this; }

// Observers may end in another order than they began (a member of a longer-lived object), so unlink wherever this one is.
Observer::~Observer() {
  for (Observer** link = &innermost; *link; link = &(*link)->outer_) {
    if (*link == this) {
      *link = outer_;
      return;
    }
  }
}

void issue(const Record& record) {
  for (Observer* observer = innermost; observer; observer = observer->outer_) observer->on_issue(record);
}

Cause::Cause(std::string_view op, bool implicit) : outer_op_(cause_op), outer_implicit_(cause_implicit) {
  cause_op = op;
  cause_implicit = implicit;
}

Cause::~Cause() {
  cause_op = outer_op_;
  cause_implicit = outer_implicit_;
}

std::string_view Cause::op() { return cause_op; }
bool Cause::implicit() { return cause_implicit; }

}  // namespace dtensor::comm
