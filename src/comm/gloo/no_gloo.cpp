// Stands for the gloo transport in a build without the gloo library.
#include <dtensor/error.hpp>

#include "src/comm/rendezvous/rendezvous.hpp"

namespace dtensor::comm {

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) { return make_gloo_transport(options, nullptr); }

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions&, std::shared_ptr<Listener>) {
  fail("make_gloo_transport", "this build has no gloo transport; hint: install libgloo-dev and configure with -Dgloo=enabled");
}

}  // namespace dtensor::comm
