// Implicit communication as an error.
#pragma once

#pragma GCC visibility push(default)

namespace dtensor {

// While it lives, an operator of this thread that would have to move an operand throws instead. The error names the operator, the operand,
// both layouts and the bytes. redistribute, to_local, full_tensor and item() still communicate.
class ExplicitCommunication {
 public:
  ExplicitCommunication();
  ~ExplicitCommunication();
  ExplicitCommunication(const ExplicitCommunication&) = delete;
  ExplicitCommunication& operator=(const ExplicitCommunication&) = delete;
};
inline ExplicitCommunication explicit_communication() { return ExplicitCommunication(); }

}  // namespace dtensor

#pragma GCC visibility pop
