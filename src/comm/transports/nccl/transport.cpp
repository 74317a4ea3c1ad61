// The nccl transport: one rank per process and GPU, on top of a transport between processes.
#include "src/comm/transports/nccl/communicator.hpp"

#include "src/comm/failed_operators.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <range/v3/action/push_back.hpp>
#include <range/v3/numeric/iota.hpp>

#include <cstdio>
#include <exception>
#include <utility>

namespace dtensor::comm {

namespace nccl {

namespace {

int count_devices() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

class NcclTransport final : public Transport {
 public:
  NcclTransport(std::unique_ptr<Transport> host, int device)
      : Transport(*host), host_(std::move(host)), control_(dynamic_cast<Control*>(host_.get())),
        session_(std::make_shared<Session>(host_->rank(), device, control_, *this)) {
    set_deadline(host_->deadline());
  }

  // What nobody waited for may fail too, and then nobody was told.
  ~NcclTransport() override {
    for (auto& [peer, pair] : session_->pairs) pair.finish();
    session_->watchdog.drain();
    if (const auto why = session_->watchdog.untold()) detail::say("dtensor: rank {}: results may be wrong: {}\n", rank(), *why);
    session_->watchdog.stop();  // works may outlive the job
    session_->pairs.clear();
    session_->world.reset();
    session_->everyone.reset();
  }

  // Once, by all ranks.
  void set_up() {
    require(control_ || size() == 1, "make_nccl_transport",
            "got {} ranks over the transport '{}'; expected one between processes, as gloo: NCCL "
            "has one process per GPU",
            size(), host_->name());
    const int devices = count_devices(), device = session_->device;
    require(devices > 0, "make_nccl_transport",
            "no CUDA device was found; hint: nvidia-smi lists those of this machine, CUDA_VISIBLE_DEVICES may "
            "hide them, and CPU tensors go over --transport gloo");
    require(device >= 0 && device < devices, "make_nccl_transport",
            "rank {} was given cuda:{}, but there are {} devices; hint: NCCL has one "
            "process per GPU: start no more than that on each host",
            rank(), device, devices);
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)});
    if (size() > 1) connect_everyone();
  }

  std::string_view name() const override { return "nccl"; }
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) override {
    host_->set_deadline(deadline());
    std::vector<int64_t> key{nth};
    ranges::push_back(key, name);
    ranges::push_back(key, ranks);
    return std::make_shared<NcclCommunicator>(host_->connect(name, ranks), hash_counts(key), session_);
  }

  void leave(const std::string& why) override {
    host_->leave(why);
    if (!why.empty()) session_->watchdog.break_off("this rank has left", true);
  }

 private:
  void connect_everyone() {
    std::vector<int> everyone(host_->size());
    ranges::iota(everyone, 0);
    session_->everyone = host_->connect("nccl", everyone);
    const auto end = Clock::now() + deadline();
    const auto check = [&] {
      if (auto why = control_->first_failure(Milliseconds(0))) fail("make_nccl_transport", "the job cannot begin: {}", *why);
      require(Clock::now() < end, "make_nccl_transport",
              "NCCL did not connect {} ranks within the deadline; hint: NCCL_DEBUG=INFO shows how far "
              "it comes, NCCL_SOCKET_IFNAME names the network interface",
              size());
    };
    session_->world = NcclCommunicator::make_channel(*session_->everyone, session_->device, check);
    session_->watchdog.add(session_->world);
  }

  const std::unique_ptr<Transport> host_;  // outlives the session, which asks it about peers
  Control* const control_;
  const std::shared_ptr<Session> session_;
};

}  // namespace

}  // namespace nccl

bool has_nccl_transport() { return true; }
bool can_use_nccl_transport() { return nccl::count_devices() > 0; }

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> host, int device) {
  auto transport = std::make_unique<nccl::NcclTransport>(std::move(host), device);
  try {
    transport->set_up();
  } catch (...) {
    transport->leave(detail::text_of(std::current_exception()));  // or the others would wait for this rank, and it for them
    throw;
  }
  return transport;
}

namespace {

TransportKind::MakeRank alone(const ThreadsJob& job) {
  require(job.ranks == 1, "launch",
          "the nccl transport has one process per GPU; got {} ranks in one process; hint: dtensor-run -n {} ./program "
          "--transport nccl",
          job.ranks, job.ranks);
  return [](int) { return make_nccl_transport(std::move(make_threads_transports(1).front()), 0); };
}

std::unique_ptr<Transport> of_process(const ProcessJob& job) {
  require(job.device.has_value(), "launch",
          "the environment does not say which GPU is this rank's; hint: set LOCAL_RANK to its number among the "
          "ranks of the host, or start the program with dtensor-run or torchrun");
  return make_nccl_transport(transport_kind("shm").process(job), *job.device);
}

const RegisterTransport over_nccl({.name = "nccl", .threads = alone, .process = of_process});

}  // namespace

}  // namespace dtensor::comm
