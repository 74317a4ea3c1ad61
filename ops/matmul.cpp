// Products of matrices and vectors.
#include "ops/family.hpp"

namespace dtensor::rules {
namespace {

const Options kProduct{.multilinear = true};

// libtorch's kernel takes an added number for the result where a rank's shard of the matrix is empty: there it gets a vector.
class Addmv final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return product_->candidates(call, mesh_dim); }
  std::vector<Sizes> output_sizes(const Call& call) const override { return product_->output_sizes(call); }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto& added = *resolution.in[0];
    const auto matrix = resolution.in[1]->local_sizes();
    const bool broadcasts = added.ndim() == 0 || added.sizes()[0] != call.operands[1].sizes()[0];
    if (!broadcasts || !is_empty(matrix)) return {};
    return [rows = matrix[0]](LocalCall& local) {
      local.arg(0) = local.arg(0).toTensor().expand({rows});
      local.call();
    };
  }

 private:
  RulePtr product_ = einsum("m+mk,k->m", kProduct);
};

const Register mm("aten::mm", einsum("mk,kn->mn", kProduct), "rows and columns are independent; products over k add up");
const Register bmm("aten::bmm", einsum("bmk,bkn->bmn", kProduct), "as mm, for each b");
const Register mv("aten::mv", einsum("mk,k->m", kProduct), "as mm");
const Register dot("aten::dot aten::vdot", einsum("k,k->", kProduct), "products over k add up");
const Register ger("aten::ger aten::outer", einsum("m,n->mn", kProduct), "every element is one product");
const Register addmm("aten::addmm", einsum("mn+mk,kn->mn", kProduct),
                     "as mm; the added term counts once, so it is Partial where the product is");
const Register activation("aten::_addmm_activation", einsum("mn+mk,kn->mn", {.whole = "k"}),
                          "as addmm, but the activation needs the finished sum");
const Register addmv("aten::addmv", std::make_shared<Addmv>(), "as addmm");
const Register addr("aten::addr", einsum("mn+m,n->mn", kProduct), "as addmm");
const Register baddbmm("aten::baddbmm", einsum("bmn+bmk,bkn->bmn", kProduct), "as addmm, for each b");
const Register addbmm("aten::addbmm", einsum("mn+bmk,bkn->mn", kProduct), "as addmm; products over b add up too");

}  // namespace
}  // namespace dtensor::rules
