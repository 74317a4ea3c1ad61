// Replaces the gloo transport in a build without the gloo library.
#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include "src/comm/rendezvous/rendezvous.hpp"

namespace dtensor::comm {

namespace {

constexpr const char* kMissing = "install libgloo-dev and configure with -Dgloo=enabled";

const RegisterTransport no_gloo({.name = "gloo", .missing = kMissing});
const RegisterTransport no_shm({.name = "shm", .missing = kMissing});

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) { return make_gloo_transport(options, nullptr); }

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions&, std::shared_ptr<Listener>) {
  fail("make_gloo_transport", "this build has no gloo transport; hint: {}", kMissing);
}

}  // namespace dtensor::comm
