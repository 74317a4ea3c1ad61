#include <dtensor/data/feed.hpp>

#include "src/data/parcel.hpp"

#include <dtensor/base/error_text.hpp>
#include <dtensor/rng/lent_stream.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <fmt/ranges.h>
#include <range/v3/numeric/iota.hpp>

#include <exception>
#include <optional>

namespace dtensor::data {

namespace {

// What the workers of a pass draw from, and what that does to the rank's own generator.
//
// In the plain program workers and rank draw from one generator. Unless only one of them draws, the order depends on timing. So here the
// workers begin where the rank's generator stands when the pass begins. They have the plain program's numbers as long as the rank draws
// nothing, and the rank then goes on where they end. Once the workers have drawn, the rank's generator is moved far ahead, so that the rank
// draws other numbers than they do.
class WorkerRandom {
 public:
  WorkerRandom(World& world, const std::vector<std::thread>& workers)
      : world_(world),
        stream_(std::make_shared<rng::LentStream>(world.generator(), world.size() == 1)),
        lent_(rng::lend(stream_, workers)) {}

  // Around each call of the loader.
  void before() { rank_drew_ |= left_.defined() && !left_.equal(world_.generator().get_state()); }
  void after(bool came) {
    if (world_.size() == 1) return;  // they share it, as in the plain program
    stream_->start();
    auto& generator = world_.generator();
    if (stream_->has_drawn()) {
      if (!came && !rank_drew_) {
        generator.set_state(stream_->generator().get_state());
      } else if (!moved_) {
        rng::move_far(generator);
        moved_ = true;
      }
    }
    left_ = generator.get_state();
  }

 private:
  World& world_;
  std::shared_ptr<rng::LentStream> stream_;
  std::shared_ptr<void> lent_;
  at::Tensor left_;  // the rank's generator after the last call
  bool rank_drew_ = false, moved_ = false;
};

}  // namespace

struct Feed::State {
  using Load = std::function<bool()>;
  using Visit = std::function<void(PartVisitor&)>;

  DeviceMesh mesh;
  World& world;
  comm::Communicator* group;  // null where every rank loads
  std::optional<WorkerRandom> random;

  bool loads() const { return !group || group->rank() == 0; }

  bool ask(const Load& load) {
    if (random) random->before();
    const bool came = load();
    if (random) random->after(came);
    return came;
  }

  bool send(const Load& load, const Visit& visit) {
    Parcel parcel;
    std::exception_ptr error;
    const auto before = world.generator().get_state();
    try {
      parcel.kind = ask(load) ? Parcel::Kind::batch : Parcel::Kind::end;
      if (parcel.kind == Parcel::Kind::batch) visit(parcel);
    } catch (...) {
      error = std::current_exception();
      parcel = Parcel::of_error(dtensor::detail::text_of(error));
    }
    const auto after = world.generator().get_state();
    if (!after.equal(before)) parcel.generator = after;
    parcel.send(*group);
    if (error) std::rethrow_exception(error);
    return parcel.kind == Parcel::Kind::batch;
  }

  bool receive(const Visit& visit) {
    auto parcel = Parcel::receive(*group);
    require(parcel.kind != Parcel::Kind::error, "batches", "rank {}, which loads for all, could not load a batch: {}", group->ranks()[0],
            parcel.error());
    if (parcel.generator.defined()) world.generator().set_state(parcel.generator);
    if (parcel.kind == Parcel::Kind::end) return false;
    visit(parcel);
    return true;
  }
};

namespace {

comm::Communicator* all_of(const DeviceMesh& mesh) {
  std::vector<int64_t> dims(mesh.ndim());
  ranges::iota(dims, 0);
  return &mesh.communicator(dims);
}

}  // namespace

Feed::Feed(const DeviceMesh& mesh, bool one_loads, const std::vector<std::thread>& workers) {
  require(mesh.contains_this_rank(), "batches", "this rank is not in the mesh {}", mesh.str());
  auto* group = one_loads && mesh.size() > 1 ? all_of(mesh) : nullptr;
  state_ = std::make_unique<State>(State{mesh, mesh.world(), group, std::nullopt});
  if (!workers.empty() && state_->loads()) state_->random.emplace(mesh.world(), workers);
}
Feed::~Feed() = default;

bool Feed::next(const std::function<bool()>& load, const std::function<void(PartVisitor&)>& visit) {
  NoSpmd plain;
  if (!state_->group) return state_->ask(load);
  comm::Cause cause("dt::batches", false);
  return state_->loads() ? state_->send(load, visit) : state_->receive(visit);
}

// -- Laying out ---------------------------------------------------------------------------------------------------------------

LayOut::LayOut(const DeviceMesh& mesh, PlacementsRef placements) : mesh_(mesh), placements_(placements), cuts_(placements.size()) {}

void LayOut::tensor(at::Tensor& tensor) {
  if (!tensor.defined()) return;
  ++tensors_;
  Placements placements(placements_.begin(), placements_.end());
  const int64_t missing = examples_ > 0 ? 1 : 0;  // dims that stacking would add in front
  for (size_t i = 0; i < placements.size(); ++i) {
    auto& placement = placements[i];
    if (!placement.is_shard()) continue;
    const int64_t dim = (placement.dim < 0 ? placement.dim + tensor.dim() + missing : placement.dim) - missing;
    const bool cuts = dim >= 0 && dim < tensor.dim();
    cuts_[i] = cuts_[i] || cuts || (missing > 0 && dim == -1);
    if (cuts) {
      placement.dim = static_cast<int16_t>(dim);
    } else {
      placement = replicate();
    }
  }
  if (tensor.device().type() != mesh_.device_type()) tensor = tensor.to(c10::Device(mesh_.device_type()));
  tensor = distribute_tensor(tensor, mesh_, placements);
}

void LayOut::finish() const {
  for (size_t i = 0; tensors_ > 0 && i < placements_.size(); ++i) {
    require(
        !placements_[i].is_shard() || cuts_[i], "batches",
        "no tensor of the batch has the dim that mesh dimension '{}' is to cut; got placements {}; hint: dims are counted from 0, of the "
        "batch, which is dim 0 itself",
        mesh_.names()[i], str(placements_));
  }
}

}  // namespace dtensor::data
