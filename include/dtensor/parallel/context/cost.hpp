// What a call takes, as far as that can be said before: by the work of the ranks and the planner's prices of messages.
#pragma once

#include <dtensor/parallel/context/plan.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Of the whole: heads, and the dim of each.
struct AttentionShape {
  int64_t batch = 1, heads = 1, key_heads = 1, dim = 1;
  int64_t element_size = 4, sum_size = 4;  // bytes of inputs, and of sums and gradients
};

// A forward and a backward pass over a sequence that is cut as the plan says.
class AttentionCost {
 public:
  // `sizes` are those of the mesh whose ranks these are, `links` the prices along its dimensions. A rank computes `flops` in a second.
  AttentionCost(const ContextPlan& plan, const AttentionShape& s, std::vector<int64_t> sizes, std::vector<CommCost> l, double flops)
      : shape(s), links(std::move(l)), flops_(flops), ranks_(plan.ranks()), most_met_(plan.most_met()), sizes_(std::move(sizes)) {
    for (int r = 0; r < ranks_; ++r) {
      const auto cells = plan.cells(r) * (plan.batch() == 1 ? shape.batch : 1);
      most_cells_ = std::max(most_cells_, cells);
      all_cells_ += cells;
      most_rows_ = std::max(most_rows_, plan.length(r));
    }
  }

  const AttentionShape shape;
  const std::vector<CommCost> links;

  int64_t ranks() const { return ranks_; }
  int64_t outer() const { return sizes_.front(); }
  int64_t inner() const { return sizes_.back(); }
  int64_t met() const { return most_met_; }  // ranks whose keys a rank sees, at most
  // Elements of a rank's rows of `heads` heads.
  int64_t elements(int64_t heads, int64_t per_row) const { return shape.batch * heads * most_rows_ * per_row; }

  // Seconds of the products of a forward pass: by the busiest rank; and of the whole, for so many heads.
  double forward() const { return seconds(most_cells_, shape.heads); }
  double forward_of_heads(int64_t heads) const { return seconds(all_cells_, heads); }

  // Seconds of messages of so many bytes, along the slowest dimension or a given one.
  double messages(double count, double bytes) const {
    double most = 0;
    for (size_t d = 0; d < links.size(); ++d) most = std::max(most, messages_along(d, count, bytes));
    return most;
  }
  double messages_along(size_t dim, double count, double bytes) const { return count * links[dim].latency + bytes / links[dim].bandwidth; }

 private:
  double seconds(int64_t cells, int64_t heads) const { return 4.0 * static_cast<double>(cells * heads * shape.dim) / flops_; }

  const double flops_;
  const int ranks_;
  const int64_t most_met_;
  const std::vector<int64_t> sizes_;
  int64_t most_cells_ = 0, all_cells_ = 0, most_rows_ = 0;
};

constexpr double kBackward = 2.5;  // products of a backward pass, over those of a forward one

}  // namespace dtensor::context

#pragma GCC visibility pop
