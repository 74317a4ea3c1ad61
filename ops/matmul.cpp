// Products of matrices and vectors.
#include <dtensor/rules/rule.hpp>

namespace dtensor::rules {
namespace {

const Options kProduct{.multilinear = true};

const Register mm("aten::mm", einsum("mk,kn->mn", kProduct), "rows and columns are independent; products over k add up");
const Register bmm("aten::bmm", einsum("bmk,bkn->bmn", kProduct), "as mm, for each b");
const Register mv("aten::mv", einsum("mk,k->m", kProduct), "as mm");
const Register dot("aten::dot aten::vdot", einsum("k,k->", kProduct), "products over k add up");
const Register ger("aten::ger aten::outer", einsum("m,n->mn", kProduct), "every element is one product");
const Register addmm("aten::addmm", einsum("mn+mk,kn->mn", kProduct),
                     "as mm; the added term counts once, so it is Partial where the product is");
const Register activation("aten::_addmm_activation", einsum("mn+mk,kn->mn", {.whole = "k"}),
                          "as addmm, but the activation needs the finished sum");
const Register addmv("aten::addmv", einsum("m+mk,k->m", kProduct), "as addmm");
const Register addr("aten::addr", einsum("mn+m,n->mn", kProduct), "as addmm");
const Register baddbmm("aten::baddbmm", einsum("bmn+bmk,bkn->bmn", kProduct), "as addmm, for each b");
const Register addbmm("aten::addbmm", einsum("mn+bmk,bkn->mn", kProduct), "as addmm; products over b add up too");

}  // namespace
}  // namespace dtensor::rules
