// Sample arguments, a line per operator or family: "names: sample | sample". The in-place and out= forms share them.
#include "tools/opcheck/sample.hpp"

namespace dtensor::opcheck {

const char* common_samples() {
  return R"(
# -- products
mm: self=[6,4] mat2=[4,5] | self=[5,3]t mat2=[3,7] | self=[3,2] mat2=[2,1] | self=[0,4] mat2=[4,3]
bmm: self=[5,6,4] mat2=[5,4,3] | self=[3,2,5]t mat2=[3,5,7]t
mv: self=[6,4] vec=[4] | self=[5,7]t vec=[7]
dot vdot: self=[7] other=[7] tensor=[7] | self=[7] tensor=[7] | self=[7] other=[7]
ger outer: self=[6] vec2=[5] | self=[3] vec2=[7]
addmm _addmm_activation: self=[6,5] mat1=[6,4] mat2=[4,5] | self=[5] mat1=[6,4] mat2=[4,5] beta=3 alpha=2 | self=[7,1] mat1=[7,3] mat2=[3,4]
addmv: self=[6] mat=[6,4] vec=[4] | self=[5] mat=[5,3] vec=[3] beta=2 alpha=0.5
addr: self=[6,5] vec1=[6] vec2=[5]
baddbmm: self=[5,6,3] batch1=[5,6,4] batch2=[5,4,3] | self=[6,1] batch1=[3,6,4] batch2=[3,4,2] beta=2
addbmm: self=[6,3] batch1=[5,6,4] batch2=[5,4,3]
matmul: self=[6,4] other=[4,5] | self=[2,5,6,4] other=[4,3] | self=[5,6,4] other=[5,4,3] | self=[4] other=[4,6] | self=[6,4] other=[4]
linear: input=[3,6,4] weight=[5,4] bias=[5] | input=[6,4] weight=[5,4]
_grouped_mm: self=[6,4] mat2=[3,4,5] offs=[3]s
bilinear: input1=[6,3] input2=[6,4] weight=[5,3,4] bias=[5]
chain_matmul linalg_multi_dot: matrices={[6,4];[4,5];[5,3]} | tensors={[6,4];[4,5];[5,3]}
kron: self=[3,4] other=[2,5]
inner: self=[5,4] other=[3,4]
tensordot: self=[5,3,4] other=[4,3,2] dims_self=[1,2] dims_other=[1,0]
einsum: equation=bik,bkj->bij tensors={[4,5,6];[4,6,3]}
cross linalg_cross: self=[5,3] other=[5,3] dim=1 | self=[3,6] other=[3,6] dim=0
cdist _euclidean_dist: x1=[6,4] x2=[5,4] p=2. | x1=[3,6,4] x2=[3,5,4] p=1. | x1=[6,4] x2=[5,4] | x1=[3,6,4] x2=[3,5,4]
_cdist_forward: x1=[6,4] x2=[5,4] p=2. compute_mode=none | x1=[3,6,4] x2=[3,5,4] p=1. compute_mode=none
_cdist_backward: grad=[6,5] x1=[6,4] x2=[5,4] p=2. cdist=[6,5]+ | grad=[3,6,5] x1=[3,6,4] x2=[3,5,4] p=1. cdist=[3,6,5]+ | grad_output=[6,5] x1=[6,4] x2=[5,4] p=2. cdist=[6,5]+ | grad_output=[3,6,5] x1=[3,6,4] x2=[3,5,4] p=1. cdist=[3,6,5]+
_weight_norm_interface: v=[6,4] g=[6,1] dim=0 | v=[6,4] g=[1,4] dim=1
_weight_norm_interface_backward: grad_w=[6,4] saved_v=[6,4] saved_g=[6,1] saved_norms=[6,1]+ dim=0
_pdist_forward pdist: self=[6,4] p=2.
dist: self=[6,4] other=[6,4] p=2
# -- reductions
sum nansum mean: self=[5,3,4] | self=[5,3,4] dim=[0] | self=[5,3,4] dim=[0,2] keepdim=true | self=[5,3]t dim=[-1] | self=[] dim=[0] | self=[2,3] dim=[0] | self=[6,4] dtype=double
amax amin: self=[5,3,4] dim=[0] | self=[5,3,4] dim=[0,2] keepdim=true | self=[5,3] | self=[2,3] dim=[0] | self=[6,7]
aminmax: self=[5,3,4] dim=0 | self=[5,3] | self=[5,3] dim=1 keepdim=true
max min: self=[5,3,4] | self=[5,3,4] dim=0 | self=[5,3] dim=1 keepdim=true | self=[5,3] other=[5,3] | self=[]
argmax argmin: self=[5,3,4] | self=[5,3,4] dim=0 | self=[5,3] dim=1 keepdim=true | self=[7]
median nanmedian: self=[5,3,4] | self=[5,3,4] dim=0 | self=[5,3] dim=1 keepdim=true
mode: self=[5,3,4]i dim=0 | self=[5,3]i dim=1 keepdim=true | self=[5,7]
kthvalue: self=[5,3,4] k=2 dim=0 | self=[5,3] k=1 dim=1 keepdim=true
prod: self=[5,3,4] | self=[5,3,4] dim=0 | self=[5,3] dim=1 keepdim=true
any all: self=[5,3,4] | self=[5,3,4] dim=0 | self=[5,3] dim=1 keepdim=true | self=[5,3,4] dim=[0,2] | self=[5,3]? dim=[0]
count_nonzero: self=[5,3,4] dim=0 | self=[5,3]? dim=[0,1] | self=[5,3]
var std var_mean std_mean: self=[5,3,4] dim=[0] | self=[5,3,4] dim=[0,2] correction=0 keepdim=true | self=[5,3] unbiased=true | self=[5,3] dim=[1] unbiased=false
linalg_vector_norm: self=[5,3,4] ord=2 | self=[5,3,4] ord=3 dim=[0] | self=[5,3] ord=1 dim=[1] keepdim=true | self=[5,3] ord=inf dim=[0] | self=[5,3] ord=-inf | self=[5,3] ord=0
renorm: self=[5,3,4] p=2 dim=0 maxnorm=1 | self=[5,3,4] p=2 dim=1 maxnorm=1.5
logsumexp special_logsumexp: self=[5,3,4] dim=[0] | self=[5,3,4] dim=[0,2] keepdim=true | self=[5,3] dim=[1]
cumsum cumprod logcumsumexp cummax cummin: self=[5,3,4] dim=0 | self=[5,3,4] dim=-1 | self=[] dim=0
_cummax_helper _cummin_helper: self=[5,3] values=[5,3] indices=[5,3]i dim=0
cumprod_backward: grad=[5,3] input=[5,3] dim=0 output=[5,3]
cummaxmin_backward: grad=[5,3] input=[5,3] indices=[5,3]<5 dim=0
trapz trapezoid cumulative_trapezoid: y=[5,4] dim=0 | y=[5,4] x=[5,4] dim=1
trace: self=[5,4]
diff: self=[5,4] n=1 dim=0
logdet det slogdet linalg_det linalg_slogdet: self=[3,4,4]d A=[3,4,4]d | self=[3,4,4]d | A=[3,4,4]d
histc: self=[20] bins=5 min=-2 max=2
corrcoef cov: self=[4,6]
quantile nanquantile: self=[5,7] q=0.25 dim=-1 | self=[5,7,3] q=0.5 dim=-2 | self=[5,7] q=[3]u dim=0 keepdim=true
# -- softmax and losses
_softmax _log_softmax _safe_softmax: self=[5,3,4] dim=0 half_to_float=false | self=[5,3,4] dim=-1 half_to_float=false | self=[] dim=0 half_to_float=false | self=[5,3] dim=1
softmax log_softmax: self=[5,3,4] dim=0 | self=[5,3,4] dim=-1
_softmax_backward_data _log_softmax_backward_data: grad_output=[5,3] output=[5,3]u dim=1 input_dtype=double | grad_output=[5,3,4] output=[5,3,4]u dim=0 input_dtype=double
nll_loss_forward nll_loss nll_loss_nd: self=[6,5] target=[6]<5 weight=- reduction=1 ignore_index=-100 | self=[6,5] target=[6]<5 weight=[5]u reduction=1 ignore_index=2 | self=[6,5] target=[6]<5 weight=- reduction=2 ignore_index=-100 | self=[6,5] target=[6]<5 weight=[5]u reduction=0 ignore_index=-100 | self=[5] target=[]<5 weight=- reduction=1 ignore_index=-100
nll_loss_backward: grad_output=[] self=[6,5] target=[6]<5 weight=- reduction=1 ignore_index=-100 total_weight=[]+ | grad_output=[6] self=[6,5] target=[6]<5 weight=[5]u reduction=0 ignore_index=1 total_weight=[]+ | grad_output=[] self=[6,5] target=[6]<5 weight=[5]u reduction=2 ignore_index=-100 total_weight=[]+
nll_loss2d_forward nll_loss2d: self=[4,5,3,6] target=[4,3,6]<5 weight=- reduction=1 ignore_index=-100 | self=[4,5,3,6] target=[4,3,6]<5 weight=[5]u reduction=0 ignore_index=2 | self=[4,5,3,6] target=[4,3,6]<5 weight=[5]u reduction=2 ignore_index=-100
nll_loss2d_backward: grad_output=[] self=[4,5,3,6] target=[4,3,6]<5 weight=- reduction=1 ignore_index=-100 total_weight=[]+ | grad_output=[4,3,6] self=[4,5,3,6] target=[4,3,6]<5 weight=[5]u reduction=0 ignore_index=-100 total_weight=[]+
cross_entropy_loss: self=[6,5] target=[6]<5 | self=[6,5] target=[6,5]u reduction=2 label_smoothing=0.1
mse_loss l1_loss huber_loss smooth_l1_loss soft_margin_loss: self=[6,4] target=[6,4] reduction=1 | self=[6,4] target=[6,4] reduction=2 | self=[6,4] target=[6,4] reduction=0 | self=[5,4] target=[4] reduction=1
binary_cross_entropy: self=[6,4]u target=[6,4]u weight=- reduction=1 | self=[6,4]u target=[6,4]u weight=[6,4]u reduction=0 | self=[6,4]u target=[6,4]u weight=[4]u reduction=2
binary_cross_entropy_with_logits: self=[6,4] target=[6,4]u reduction=1 | self=[6,4] target=[6,4]u weight=[4]u pos_weight=[4]u reduction=2 | self=[6,4] target=[6,4]u reduction=0
mse_loss_backward l1_loss_backward soft_margin_loss_backward: grad_output=[] self=[6,4] target=[6,4] reduction=1 | grad_output=[6,4] self=[6,4] target=[6,4] reduction=0 | grad_output=[] self=[6,4] target=[6,4] reduction=2
smooth_l1_loss_backward: grad_output=[] self=[6,4] target=[6,4] reduction=1 beta=1.5 | grad_output=[6,4] self=[6,4] target=[6,4] reduction=0 beta=1.
huber_loss_backward: grad_output=[] self=[6,4] target=[6,4] reduction=1 delta=0.5 | grad_output=[6,4] self=[6,4] target=[6,4] reduction=0 delta=1.
binary_cross_entropy_backward: grad_output=[] self=[6,4]u target=[6,4]u weight=- reduction=1 | grad_output=[6,4] self=[6,4]u target=[6,4]u weight=[6,4]u reduction=0
kl_div: self=[6,4] target=[6,4]u reduction=1 | self=[6,4] target=[6,4]u reduction=2 | self=[6,4] target=[6,4]u reduction=0
multi_margin_loss: self=[6,5] target=[6]<5 | self=[6,5] target=[6]<5 reduction=0 | self=[6,5] target=[6]<5 p=2 margin=0.5 weight=[5]u reduction=2
multi_margin_loss_backward: grad_output=[] self=[6,5] target=[6]<5 p=1 margin=1 | grad_output=[6] self=[6,5] target=[6]<5 p=1 margin=1 reduction=0
multilabel_margin_loss_forward multilabel_margin_loss: self=[6,5] target=[6,5]<5 reduction=1 | self=[6,5] target=[6,5]<5 reduction=0
multilabel_margin_loss_backward: grad_output=[] self=[6,5] target=[6,5]<5 reduction=1 is_target=[6,5]u
cosine_embedding_loss: input1=[6,4] input2=[6,4] target=[6]o
hinge_embedding_loss margin_ranking_loss: self=[6,4] target=[6,4]o | input1=[6] input2=[6] target=[6]o
triplet_margin_loss: anchor=[6,4] positive=[6,4] negative=[6,4]
poisson_nll_loss: input=[6,4] target=[6,4]+ log_input=true full=false eps=0.001 reduction=1
cosine_similarity: x1=[6,4] x2=[6,4] dim=1
pairwise_distance: x1=[6,4] x2=[6,4]
# -- normalization
native_layer_norm: input=[6,3,4] normalized_shape=[4] weight=[4] bias=[4] eps=0.001 | input=[6,3,4] normalized_shape=[3,4] weight=[3,4] bias=[3,4] eps=0.001 | input=[5,4] normalized_shape=[4] weight=- bias=- eps=0.001
native_layer_norm_backward: grad_out=[6,3,4] input=[6,3,4] normalized_shape=[4] mean=[6,3,1] rstd=[6,3,1]+ weight=[4] bias=[4] output_mask=[true,true,true] | grad_out=[5,4] input=[5,4] normalized_shape=[4] mean=[5,1] rstd=[5,1]+ weight=- bias=- output_mask=[true,false,false]
_fused_rms_norm rms_norm: input=[6,3,4] normalized_shape=[4] weight=[4] eps=0.001 | input=[6,3,4] normalized_shape=[3,4] weight=- eps=none
_fused_rms_norm_backward: grad_out=[6,3,4] input=[6,3,4] normalized_shape=[4] rstd=[6,3,1]+ weight=[4] output_mask=[true,true]
native_group_norm: input=[5,4,6] weight=[4] bias=[4] N=5 C=4 HxW=6 group=2 eps=0.001 | input=[5,6,3,2] weight=- bias=- N=5 C=6 HxW=6 group=3 eps=0.001
native_group_norm_backward: grad_out=[5,4,6] input=[5,4,6] mean=[5,2] rstd=[5,2]+ weight=[4] N=5 C=4 HxW=6 group=2 output_mask=[true,true,true]
native_batch_norm _native_batch_norm_legit _batch_norm_impl_index: input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ training=true momentum=0.1 eps=0.001 | input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ training=false momentum=0.1 eps=0.001 | input=[6,4,3,5] weight=- bias=- running_mean=- running_var=- training=true momentum=0.1 eps=0.001 | input=[6,3,4] weight=[3] bias=[3] training=true momentum=0.1 eps=0.001 | input=[6,5] weight=[5] bias=- running_mean=[5] running_var=[5]+ training=true momentum=0.1 eps=0.001
_native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update _native_batch_norm_legit_no_training: input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ training=true momentum=0.1 eps=0.001 | input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ momentum=0.1 eps=0.001 | input=[6,5] weight=[5] bias=- running_mean=[5] running_var=[5]+ momentum=0.1 eps=0.001
native_batch_norm_backward: grad_out=[6,3,4] input=[6,3,4] weight=[3] running_mean=[3] running_var=[3]+ save_mean=[3] save_invstd=[3]+ train=true eps=0.001 output_mask=[true,true,true] | grad_out=[6,3,4] input=[6,3,4] weight=[3] running_mean=[3] running_var=[3]+ save_mean=[3] save_invstd=[3]+ train=false eps=0.001 output_mask=[true,true,true]
batch_norm_backward: grad_out=[6,3,4] input=[6,3,4] weight=[3] running_mean=[3] running_var=[3]+ save_mean=[3] save_var=[3]+ update=true eps=0.001 output_mask=[true,true,true] reserve=[0]
batch_norm instance_norm: input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ training=true momentum=0.1 eps=0.001 cudnn_enabled=false | input=[6,3,4] weight=[3] bias=[3] running_mean=[3] running_var=[3]+ use_input_stats=true momentum=0.1 eps=0.001 cudnn_enabled=false
batch_norm_update_stats: input=[6,3,4] running_mean=[3] running_var=[3]+ momentum=0.1
# -- views
view _unsafe_view _reshape_copy view_copy _view_copy: self=[6,4] size=[24] | self=[6,4] size=[2,3,4] | self=[2,3,4] size=[6,4] | self=[6,4] size=[6,2,2] | self=[6,4] size=[3,8] | self=[6] size=[3,-1] | self=[6,4]i dtype=double
_reshape_alias _reshape_alias_copy: self=[6,4] size=[24] stride=[1] | self=[2,3,4] size=[6,4] stride=[4,1]
flatten: self=[5,3,4] start_dim=0 end_dim=1
unflatten: self=[6,4] dim=0 sizes=[2,3]
permute permute_copy: self=[5,3,4] dims=[2,0,1] | self=[5,3] dims=[1,0]
transpose transpose_copy swapdims swapaxes: self=[5,3,4] dim0=0 dim1=2 | self=[5,3] dim0=-1 dim1=0 | self=[5,3,4] axis0=0 axis1=1
t t_copy: self=[5,3] | self=[6]
squeeze squeeze_copy: self=[5,1,4] | self=[5,1,4] dim=1 | self=[5,3,1] dim=[1,2] | self=[5,4] dim=0
unsqueeze unsqueeze_copy: self=[5,3] dim=0 | self=[5,3] dim=-1 | self=[] dim=0
expand expand_copy: self=[5,1,4] size=[5,3,4] | self=[3,1] size=[6,3,4] | self=[4] size=[5,-1]
expand_as view_as reshape_as: self=[5,1] other=[5,4] | self=[6,4] other=[4,6]
select select_copy: self=[5,3,4] dim=0 index=2 | self=[5,3] dim=1 index=-1
slice slice_copy: self=[6,4] dim=0 start=0 end=3 | self=[6,4] dim=0 start=1 end=5 | self=[7,3] dim=0 start=0 end=100 step=2 | self=[6,8] dim=1 start=4 end=8 | self=[6,4] dim=1
narrow_copy: self=[6,4] dim=0 start=2 length=3 | self=[6,8] dim=1 start=0 length=4
split_copy unsafe_split: self=[6,4] split_size=3 dim=0 | self=[5,4] split_size=2 dim=0 | self=[6,4] split_size=2 dim=1
split_with_sizes split_with_sizes_copy unsafe_split_with_sizes: self=[6,4] split_sizes=[2,4] dim=0 | self=[6,4] split_sizes=[1,3] dim=1
chunk unsafe_chunk: self=[6,4] chunks=2 dim=0
unbind unbind_copy: self=[3,5] dim=0 | self=[5,3,4] dim=1
diagonal diagonal_copy: self=[5,5] | self=[5,3,4] offset=1 dim1=0 dim2=2
linalg_diagonal: A=[3,5,4] | A=[3,5,4] offset=1
unfold unfold_copy: self=[7,3] dimension=0 size=3 step=2 | self=[4,6] dimension=1 size=2 step=2
as_strided as_strided_copy: self=[6,4] size=[3,4] stride=[8,1] storage_offset=4 | self=[6,4] size=[4,6] stride=[1,4]
view_as_real view_as_real_copy _conj _conj_copy _neg_view _neg_view_copy resolve_conj resolve_neg conj: self=[5,3]c | self=[5,3]
view_as_complex view_as_complex_copy: self=[5,3,2]
real imag: self=[5,3]c
detach: self=[5,3] | self=[]
detach_copy alias alias_copy lift lift_fresh lift_fresh_copy positive contiguous view_as: self=[5,3] | self=[5,4]t | self=[]
slice_backward: grad_output=[3,4] input_sizes=[6,4] dim=0 start=0 end=3 step=1 | grad_output=[6,2] input_sizes=[6,4] dim=1 start=2 end=4 step=1
slice_scatter: self=[6,4] src=[3,4] dim=0 start=2 end=5 | self=[6,4] src=[6,2] dim=1 start=0 end=2
slice_inverse: self=[3,4] src=[6,4] dim=0 start=2 end=5
select_backward: grad_output=[3,4] input_sizes=[5,3,4] dim=0 index=2 | grad_output=[5] input_sizes=[5,3] dim=1 index=1
select_scatter: self=[5,3,4] src=[3,4] dim=0 index=2 | self=[5,3] src=[5] dim=1 index=1
diagonal_backward: grad_output=[3] input_sizes=[5,3] offset=0 dim1=0 dim2=1 | grad_output=[3,4] input_sizes=[5,3,4] offset=0 dim1=0 dim2=1
diagonal_scatter: self=[5,3] src=[3] | self=[5,5,4] src=[4,5] dim1=0 dim2=1
unfold_backward: grad_in=[3,3,3] input_sizes=[7,3] dim=0 size=3 step=2
value_selecting_reduction_backward: grad=[3] dim=0 indices=[3]<5 sizes=[5,3] keepdim=false
as_strided_scatter: self=[6,4] src=[3,4] size=[3,4] stride=[8,1] storage_offset=4
# -- order of elements
sort: self=[5,3,4] dim=0 | self=[5,3,4] dim=-1 descending=true | self=[5,3] stable=true dim=0
argsort: self=[5,3] dim=0 | self=[5,3,4] dim=-1 descending=true
topk: self=[6,3] k=2 dim=0 | self=[5,6] k=3 dim=1 largest=false
flip: self=[5,3,4] dims=[0] | self=[5,3] dims=[0,1]
fliplr flipud: self=[5,3]
rot90: self=[5,3] k=1 dims=[0,1]
roll: self=[5,3,4] shifts=[2] dims=[0] | self=[5,3] shifts=[1] | self=[5,3,4] shifts=[1,2] dims=[1,2]
repeat: self=[5,3] repeats=[2,1] | self=[5,3] repeats=[2,1,3] | self=[5,3] repeats=[1,1]
tile: self=[5,3] dims=[2,1]
cat _cat concat: tensors={[5,3];[2,3]} dim=0 | tensors={[5,3];[5,4];[5,2]} dim=1 | tensors={[6,4];[6,4]} dim=0
stack _stack: tensors={[5,3];[5,3]} dim=0 | tensors={[5,3];[5,3];[5,3]} dim=2
hstack vstack dstack column_stack row_stack: tensors={[5,3];[5,3]}
block_diag: tensors={[5,3];[2,4]}
tril triu: self=[5,3] | self=[3,5,4] diagonal=1
diag: self=[5] | self=[5,3] diagonal=1
diag_embed: self=[5,3] | self=[5,3] offset=1 dim1=0 dim2=2
vander linalg_vander: x=[5] N=3
combinations cartesian_prod: self=[5] | tensors={[5];[3]}
# -- indexing
index _unsafe_index: self=[6,4] indices={[5]<6} | self=[6,4] indices={-;[5]<4} | self=[6,4,3] indices={[5]<6;-;[5]<3} | self=[6,4] indices={[3,1]<6;[2]<4} | self=[6,4] indices={[6]?}
index_put _index_put_impl _unsafe_index_put: self=[6,4] indices={[5]p} values=[5,4] | self=[6,4] indices={-;[3]p} values=[3] | self=[6,4] indices={[5]<6} values=[5,4] accumulate=true | self=[6,4] indices={[6,4]?} values=[] | self=[6,4] indices={[3]p;[3]p} values=[3]
index_select: self=[6,4] dim=0 index=[5]<6 | self=[6,4,3] dim=1 index=[7]<4
index_select_backward: grad=[5,4] self_sizes=[6,4] dim=0 index=[5]<6
index_add: self=[6,4] dim=0 index=[5]<6 source=[5,4] | self=[6,4] dim=1 index=[3]<4 source=[6,3] alpha=2
index_copy: self=[6,4] dim=0 index=[5]p source=[5,4] | self=[6,4] dim=1 index=[3]p source=[6,3]
index_fill: self=[6,4] dim=0 index=[3]p value=1.5 | self=[6,4] dim=1 index=[2]p value=2 | self=[6,4] dim=0 index=[3]p value=[]
index_reduce: self=[6,4] dim=0 index=[5]<6 source=[5,4] reduce=prod | self=[6,4] dim=1 index=[3]<4 source=[6,3] reduce=amax | self=[6,4] dim=1 index=[3]<4 source=[6,3] reduce=mean
gather: self=[6,4] dim=0 index=[3,4]<6 | self=[6,4] dim=1 index=[6,2]<4 | self=[6,4] dim=1 index=[5,2]<4
gather_backward: grad=[3,4] self=[6,4] dim=0 index=[3,4]<6 sparse_grad=false
take_along_dim: self=[6,4] indices=[6,2]<4 dim=1
take: self=[6,4] index=[5]<24
put: self=[6,4] index=[5]p source=[5]
scatter: self=[6,4] dim=0 index=[5,4]p src=[5,4] | self=[6,4] dim=0 index=[3,4]<6 value=1.5 | self=[6,4] dim=1 index=[6,2]<4 value=2 | self=[6,4] dim=1 index=[6,1]<4 src=[6,1] | self=[6,4] dim=1 index=[6,2]<4 src=[6,2] reduce=add | self=[6,4] dim=1 index=[6,2]<4 value=2 reduce=multiply
scatter_add: self=[6,4] dim=0 index=[5,4]<6 src=[5,4] | self=[6,4] dim=1 index=[6,3]<4 src=[6,3]
scatter_reduce: self=[6,4] dim=0 index=[5,4]<6 src=[5,4] reduce=sum | self=[6,4] dim=1 index=[6,3]<4 src=[6,3] reduce=amax | self=[6,4] dim=1 index=[6,3]<4 src=[6,3] reduce=mean include_self=false | self=[6,4] dim=0 index=[5,4]<6 src=[5,4] reduce=prod
masked_fill: self=[6,4] mask=[6,4]? value=1.5 | self=[6,4] mask=[4]? value=0 | self=[6,4] mask=[6,4]? value=[]
masked_scatter: self=[6,4] mask=[6,4]? source=[24] | self=[6,4] mask=[4]? source=[6,4] | self=[4] mask=[6,4]? source=[24] | self=[6,1] mask=[6,4]? source=[24]
masked_scatter_backward: grad_output=[6,4] mask=[6,4]? sizes=[24]
masked_select: self=[6,4] mask=[6,4]?
masked_select_backward: grad=[24] input=[6,4] mask=[6,4]?
_histogramdd_bin_edges: self=[5,3] bins=[2,3,4]
_masked_softmax: self=[5,4] mask=[5,4]? dim=1 mask_type=2
where: condition=[5,3]? self=[5,3] other=[5,3] | condition=[5,3]? self=[3] other=[5,1] | condition=[3]? self=[5,3] other=[] | condition=[5,3]? self=1.5 other=[5,3] | condition=[5,3]? self=[5,3] other=2.5 | condition=[5,3]?
nonzero argwhere nonzero_numpy flatnonzero: self=[5,3]?
nonzero_static: self=[5,3]? size=4
embedding: weight=[7,4] indices=[5]<7 | weight=[7,4] indices=[3,5]<7 padding_idx=2
embedding_dense_backward: grad_output=[5,4] indices=[5]<7 num_weights=7 padding_idx=-1 scale_grad_by_freq=false | grad_output=[3,5,4] indices=[3,5]<7 num_weights=7 padding_idx=2 scale_grad_by_freq=false | grad_output=[5,4] indices=[5]<7 num_weights=7 padding_idx=-1 scale_grad_by_freq=true
embedding_backward: grad=[5,4] indices=[5]<7 num_weights=7 padding_idx=-1 scale_grad_by_freq=false sparse=false
embedding_renorm: self=[7,4] indices=[3]p max_norm=1. norm_type=2.
one_hot: self=[6]<5 num_classes=5
searchsorted: sorted_sequence=[9]s self=[5,3] | sorted_sequence=[5,9]s self=[5,3] | sorted_sequence=[9]s self=0.5
bucketize: self=[5,3] boundaries=[9]s | self=0.5 boundaries=[9]s
isin: elements=[5,3]i test_elements=[4]i | element=2 test_elements=[4]i | elements=[5,3]i test_element=2
unique_consecutive _unique _unique2: self=[9]i
unique_dim unique_dim_consecutive: self=[5,3]i dim=0
# -- copies and factories
clone: self=[5,3] | self=[5,4]t | self=[]
copy: self=[5,3] src=[5,3] | self=[5,3] src=[3] | self=[5,3] src=[5,3]i
_to_copy: self=[5,3] dtype=float | self=[5,3] dtype=long | self=[5,3]
type_as: self=[5,3] dtype=float | self=[5,3] other=[5,3]f
fill: self=[5,3] value=1.5 | self=[5,3] value=[]
zero: self=[5,3]
full_like: self=[5,3] fill_value=2.5
zeros_like ones_like empty_like rand_like randn_like: self=[5,3] | self=[5,3] dtype=double
randint_like: self=[5,3] high=10 | self=[5,3] low=2 high=10 | self=[5,3] high=[]oi
new_zeros new_ones new_empty: self=[5,3] size=[4,2]
new_full: self=[5,3] size=[4,2] fill_value=1.5
new_empty_strided: self=[5,3] size=[4,2] stride=[2,1]
constant_pad_nd: self=[5,3] pad=[1,2] value=0 | self=[5,3,4] pad=[0,0,2,1] value=1.5
pad: self=[5,3] pad=[1,2] mode=constant
resize resize_as resize_as_sparse set: *=-
lerp: self=[5,3] end=[5,3] weight=0.3 | self=[5,3] end=[5,3] weight=[5,3]u | self=[5,3] end=[3] weight=[5,1]u
clamp clip: self=[5,3] min=-0.5 max=0.5 | self=[5,3] min=[5,3] max=[5,3] | self=[5,3] min=[3]
clamp_min clamp_max: self=[5,3] min=-0.5 | self=[5,3] max=0.5 | self=[5,3] min=[5,3] | self=[5,3] max=[3]
threshold: self=[5,3] threshold=0.1 value=2
threshold_backward: grad_output=[5,3] self=[5,3] threshold=0.1
hardtanh_backward: grad_output=[5,3] self=[5,3] min_val=-1 max_val=1
hardtanh: self=[5,3] min_val=-0.5 max_val=0.5
logit logit_backward special_logit: self=[5,3]u | self=[5,3]u eps=0.1 | grad_output=[5,3] self=[5,3]u
elu_backward: grad_output=[5,3] alpha=1 scale=1 input_scale=1 is_result=false self_or_result=[5,3]
leaky_relu_backward: grad_output=[5,3] self=[5,3] negative_slope=0.1 self_is_result=false
softplus_backward: grad_output=[5,3] self=[5,3] beta=1 threshold=20
softshrink_backward hardshrink_backward: grad_output=[5,3] self=[5,3] lambd=0.5 | grad_out=[5,3] self=[5,3] lambd=0.5
rrelu_with_noise: self=[5,3] noise=[5,3]u training=false
rrelu_with_noise_backward: grad_output=[5,3] self=[5,3] noise=[5,3]u lower=0.1 upper=0.3 training=false self_is_result=false
glu: self=[6,4] dim=0 | self=[5,4] dim=-1
glu_backward: grad_output=[3,4] self=[6,4] dim=0
prelu _prelu_kernel: self=[5,3] weight=[1] | self=[5,3] weight=[3] | self=[5,3] weight=[5,3]
_prelu_kernel_backward prelu_backward: grad_output=[5,3] self=[5,3] weight=[5,3] | grad_output=[5,3] self=[5,3] weight=[3]
polar: abs=[5,3]+ angle=[5,3]
complex: real=[5,3] imag=[5,3]
addcmul addcdiv: self=[5,3] tensor1=[5,3] tensor2=[5,3]+ | self=[3] tensor1=[5,1] tensor2=[3]+ value=2
cosh sinh: self=[5,3]
acosh: self=[5,3]+
native_dropout: input=[6,4] p=0.4 train=true
native_dropout_backward: grad_output=[6,4] mask=[6,4]? scale=1.5
dropout alpha_dropout feature_dropout: input=[6,4] p=0.4 train=true | self=[6,4] p=0.4 train=true
bernoulli: self=[6,4]u | self=[6,4]u p=0.3 | self=[6,4]u p=[6,4]u
uniform exponential cauchy log_normal geometric random: self=[6,4]+ | self=[6,4]+ p=0.3 | self=[6,4]+ to=10 | self=[6,4]+ from=2 to=9
multinomial: self=[5,6]+ num_samples=3 replacement=true
poisson: self=[6,4]+ | count=[6,4]o prob=[6,4]u
_standard_gamma _sample_dirichlet: self=[6,4]+
_fused_dropout: self=[6,4] p=0.4
mvlgamma: self=[5,3]+ p=1
polygamma: n=1 self=[5,3]+
float_power pow: self=[5,3]+ exponent=[5,3] | self=[5,3]+ exponent=2 | self=2 exponent=[5,3] | self=[5,3]+ exponent=[3]
nan_to_num: self=[5,3] nan=0.5
bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __ilshift__ __irshift__: self=[5,3]i other=[5,3]<5 | self=[5,3]i other=2 | self=2 other=[5,3]<5
nextafter: self=[5,3] other=[5,3]
heaviside: self=[5,3] values=[5,3] | self=[5,3] values=[]
ldexp: self=[5,3] other=[5,3]
polygamma: n=2 self=[5,3]+
# -- convolution and its kin
convolution convolution_overrideable: input=[4,6,9] weight=[4,6,3] bias=[4] stride=[1] padding=[1] dilation=[1] transposed=false output_padding=[0] groups=1 | input=[4,6,7,5] weight=[4,3,3,3] bias=- stride=[2,1] padding=[0,1] dilation=[1,1] transposed=false output_padding=[0,0] groups=2 | input=[4,6,7,5] weight=[6,4,3,3] bias=[4] stride=[2,2] padding=[1,1] dilation=[1,1] transposed=true output_padding=[0,0] groups=1 | input=[3,4,5,4,3] weight=[2,4,3,1,2] bias=[2] stride=[1,1,1] padding=[1,0,0] dilation=[1,1,1] transposed=false output_padding=[0,0,0] groups=1
_convolution: input=[4,6,9] weight=[4,6,3] bias=[4] stride=[1] padding=[1] dilation=[1] transposed=false output_padding=[0] groups=1 benchmark=false deterministic=false cudnn_enabled=false
convolution_backward convolution_backward_overrideable: grad_output=[4,4,9] input=[4,6,9] weight=[4,6,3] bias_sizes=[4] stride=[1] padding=[1] dilation=[1] transposed=false output_padding=[0] groups=1 output_mask=[true,true,true] | grad_output=[4,4,3,5] input=[4,6,7,5] weight=[4,3,3,3] bias_sizes=none stride=[2,1] padding=[0,1] dilation=[1,1] transposed=false output_padding=[0,0] groups=2 output_mask=[true,true,false]
mkldnn_convolution: self=[4,6,7,5] weight=[4,6,3,3] bias=[4] padding=[1,1] stride=[1,1] dilation=[1,1] groups=1
slow_conv3d slow_conv3d_forward: self=[3,4,5,4,3] weight=[2,4,3,1,2] kernel_size=[3,1,2] bias=[2] stride=[1,1,1] padding=[1,0,0]
thnn_conv2d _slow_conv2d_forward: self=[4,6,7,5] weight=[4,6,3,3] kernel_size=[3,3] bias=[4] stride=[1,1] padding=[1,1]
slow_conv_dilated2d: self=[4,6,7,5] weight=[4,6,3,3] kernel_size=[3,3] bias=[4] stride=[1,1] padding=[1,1] dilation=[2,2]
slow_conv_dilated3d: self=[3,4,5,6,7] weight=[2,4,2,2,2] kernel_size=[2,2,2] bias=[2] dilation=[2,2,2]
slow_conv_transpose2d: self=[4,6,7,5] weight=[6,4,3,3] kernel_size=[3,3] bias=[4] stride=[2,2] padding=[1,1]
slow_conv_transpose3d: self=[2,4,3,4,5] weight=[4,2,2,2,2] kernel_size=[2,2,2] bias=[2]
conv_transpose1d conv_transpose2d: input=[4,6,9] weight=[6,4,3] bias=[4] | input=[4,6,7,5] weight=[6,4,3,3] bias=[4]
conv_tbc: self=[9,4,6] weight=[3,6,4] bias=[4] pad=1
avg_pool1d: self=[4,3,8] kernel_size=[2]
avg_pool2d: self=[4,3,8,6] kernel_size=[2,2] | self=[4,3,9,7] kernel_size=[3,3] stride=[2,2] padding=[1,1] | self=[3,8,6] kernel_size=[2,2]
avg_pool2d_backward: grad_output=[4,3,4,3] self=[4,3,8,6] kernel_size=[2,2] stride=[2,2] padding=[0,0] ceil_mode=false count_include_pad=true divisor_override=none
avg_pool3d: self=[2,3,6,4,4] kernel_size=[2,2,2]
avg_pool3d_backward: grad_output=[2,3,3,2,2] self=[2,3,6,4,4] kernel_size=[2,2,2] stride=[2,2,2] padding=[0,0,0] ceil_mode=false count_include_pad=true divisor_override=none
max_pool1d max_pool1d_with_indices: self=[4,3,8] kernel_size=[2]
max_pool2d max_pool2d_with_indices mkldnn_max_pool2d: self=[4,3,8,6] kernel_size=[2,2] | self=[4,3,9,7] kernel_size=[3,3] stride=[2,2] padding=[1,1] | self=[3,8,6] kernel_size=[2,2]
max_pool2d_with_indices_backward: grad_output=[4,3,4,3] self=[4,3,8,6] kernel_size=[2,2] stride=[2,2] padding=[0,0] dilation=[1,1] ceil_mode=false indices=[4,3,4,3]m
max_pool3d max_pool3d_with_indices: self=[2,3,6,4,4] kernel_size=[2,2,2]
max_pool3d_with_indices_backward: grad_output=[2,3,3,2,2] self=[2,3,6,4,4] kernel_size=[2,2,2] stride=[2,2,2] padding=[0,0,0] dilation=[1,1,1] ceil_mode=false indices=[2,3,3,2,2]m
adaptive_avg_pool1d: self=[4,3,8] output_size=[4]
adaptive_avg_pool2d _adaptive_avg_pool2d: self=[4,3,8,6] output_size=[4,3] | self=[4,3,7,5] output_size=[3,2]
_adaptive_avg_pool2d_backward: grad_output=[4,3,4,3] self=[4,3,8,6]
adaptive_avg_pool3d _adaptive_avg_pool3d: self=[2,3,6,4,4] output_size=[3,2,2]
_adaptive_avg_pool3d_backward: grad_output=[2,3,3,2,2] self=[2,3,6,4,4]
adaptive_max_pool1d: self=[4,3,8] output_size=[4]
adaptive_max_pool2d: self=[4,3,8,6] output_size=[4,3]
adaptive_max_pool2d_backward: grad_output=[4,3,4,3] self=[4,3,8,6] indices=[4,3,4,3]<48
adaptive_max_pool3d: self=[2,3,6,4,4] output_size=[3,2,2]
adaptive_max_pool3d_backward: grad_output=[2,3,3,2,2] self=[2,3,6,4,4] indices=[2,3,3,2,2]<96
fractional_max_pool2d: self=[4,3,8,6] kernel_size=[2,2] output_size=[4,3] random_samples=[4,3,2]u
fractional_max_pool2d_backward: grad_output=[4,3,4,3] self=[4,3,8,6] kernel_size=[2,2] output_size=[4,3] indices=[4,3,4,3]<48
fractional_max_pool3d: self=[2,3,6,4,4] kernel_size=[2,2,2] output_size=[3,2,2] random_samples=[2,3,3]u
max_unpool2d: self=[4,3,2,2] indices=[4,3,2,2]<16 output_size=[4,4]
max_unpool3d: self=[2,3,2,2,2] indices=[2,3,2,2,2]<64 output_size=[4,4,4] stride=[2,2,2] padding=[0,0,0]
upsample_nearest1d upsample_nearest_exact1d _upsample_nearest_exact1d: self=[4,3,5] output_size=[10] scale_factors=none | input=[4,3,5] output_size=[10] scale_factors=none | self=[4,3,5] output_size=[10]
upsample_nearest1d_backward _upsample_nearest_exact1d_backward: grad_output=[4,3,10] output_size=[10] input_size=[4,3,5]
upsample_linear1d_backward: grad_output=[4,3,10] output_size=[10] input_size=[4,3,5] align_corners=false
upsample_nearest2d_backward _upsample_nearest_exact2d_backward: grad_output=[4,3,10,8] output_size=[10,8] input_size=[4,3,5,4]
upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward: grad_output=[4,3,10,8] output_size=[10,8] input_size=[4,3,5,4] align_corners=false
upsample_nearest3d_backward _upsample_nearest_exact3d_backward: grad_output=[2,3,6,8,4] output_size=[6,8,4] input_size=[2,3,3,4,2]
upsample_trilinear3d_backward: grad_output=[2,3,6,8,4] output_size=[6,8,4] input_size=[2,3,3,4,2] align_corners=false
reflection_pad1d replication_pad1d: self=[4,3,6] padding=[1,2]
reflection_pad1d_backward replication_pad1d_backward: grad_output=[4,3,9] self=[4,3,6] padding=[1,2]
reflection_pad2d replication_pad2d: self=[4,3,6,5] padding=[1,2,1,1]
reflection_pad2d_backward replication_pad2d_backward: grad_output=[4,3,8,8] self=[4,3,6,5] padding=[1,2,1,1]
reflection_pad3d replication_pad3d: self=[2,3,4,3,5] padding=[1,1,1,1,1,1]
reflection_pad3d_backward replication_pad3d_backward: grad_output=[2,3,6,5,7] self=[2,3,4,3,5] padding=[1,1,1,1,1,1]
pixel_shuffle math_pixel_shuffle: self=[3,8,5,4] upscale_factor=2
pixel_unshuffle: self=[3,2,6,4] downscale_factor=2
channel_shuffle native_channel_shuffle: self=[3,6,5,4] groups=2
im2col: self=[4,3,6,5] kernel_size=[2,2] dilation=[1,1] padding=[0,0] stride=[1,1]
col2im: self=[4,12,20] output_size=[6,5] kernel_size=[2,2] dilation=[1,1] padding=[0,0] stride=[1,1]
grid_sampler_2d _grid_sampler_2d_cpu_fallback: input=[4,3,6,5] grid=[4,3,4,2] interpolation_mode=0 padding_mode=0 align_corners=false
grid_sampler_2d_backward _grid_sampler_2d_cpu_fallback_backward: grad_output=[4,3,3,4] input=[4,3,6,5] grid=[4,3,4,2] interpolation_mode=0 padding_mode=0 align_corners=false output_mask=[true,true] | grad_output=[4,3,3,4] input=[4,3,6,5] grid=[4,3,4,2] interpolation_mode=0 padding_mode=0 align_corners=false
grid_sampler_3d: input=[2,3,3,4,5] grid=[2,3,2,4,3] interpolation_mode=0 padding_mode=0 align_corners=false
grid_sampler_3d_backward: grad_output=[2,3,3,2,4] input=[2,3,3,4,5] grid=[2,3,2,4,3] interpolation_mode=0 padding_mode=0 align_corners=false output_mask=[true,true]
grid_sampler: input=[4,3,6,5] grid=[4,3,4,2] interpolation_mode=0 padding_mode=0 align_corners=false
affine_grid_generator: theta=[4,2,3] size=[4,3,5,6] align_corners=false
# -- attention
scaled_dot_product_attention _scaled_dot_product_attention _scaled_dot_product_attention_math: query=[4,6,5,8] key=[4,6,7,8] value=[4,6,7,8] | query=[4,6,5,8] key=[4,6,5,8] value=[4,6,5,8] is_causal=true
_scaled_dot_product_flash_attention_for_cpu: query=[4,6,5,8] key=[4,6,7,8] value=[4,6,7,8] | query=[4,6,5,8] key=[4,6,5,8] value=[4,6,5,8] is_causal=true | query=[4,6,5,8] key=[4,6,7,8] value=[4,6,7,8] attn_mask=[5,7]
_scaled_dot_product_flash_attention_for_cpu_backward: grad_out=[4,6,5,8] query=[4,6,5,8] key=[4,6,5,8] value=[4,6,5,8] out=[4,6,5,8] logsumexp=[4,6,5] dropout_p=0. is_causal=false
# -- linear algebra
linalg_cholesky_ex cholesky linalg_cholesky: self=[5,4,4]d | self=[4,4]d
cholesky_inverse: self=[5,4,4]l
cholesky_solve _cholesky_solve_helper: self=[5,4,3] input2=[5,4,4]l | self=[5,4,3] A=[5,4,4]l upper=false
linalg_inv_ex linalg_inv inverse: A=[5,4,4]d | self=[5,4,4]d
linalg_solve_ex linalg_solve _linalg_solve_ex: A=[5,4,4]d B=[5,4,3]
linalg_solve_triangular: self=[5,4,4]l B=[5,4,3] upper=false
triangular_solve: self=[5,4,3] A=[5,4,4]l upper=false
linalg_lu linalg_lu_factor linalg_lu_factor_ex _lu_with_info: A=[5,4,4]d | self=[5,4,4]d
linalg_qr qr geqrf: A=[5,4,3] | self=[5,4,3] | A=[5,3,4] | self=[5,3,4]
linalg_householder_product orgqr: input=[5,4,3] tau=[5,3]u | self=[5,4,3] input2=[5,3]u
ormqr: self=[4,3] input2=[3] input3=[4,2]
linalg_svd _linalg_svd svd: A=[5,4,3] full_matrices=false | self=[5,4,3]
linalg_svdvals: A=[5,4,3]
_linalg_eigh: A=[5,4,4]d
linalg_eigvalsh: self=[5,4,4]d
linalg_eig linalg_eigvals _linalg_eigvals: self=[5,4,4]d
linalg_lstsq: self=[5,6,3] b=[5,6,2]
linalg_ldl_factor_ex linalg_ldl_factor: self=[5,4,4]d
linalg_matrix_exp matrix_exp: self=[5,4,4]
_linalg_det _linalg_slogdet: A=[5,4,4]d
linalg_matrix_power matrix_power: self=[5,4,4] n=3
_linalg_check_errors: *=-
# -- fft
_fft_r2c: self=[5,6,4] dim=[1] normalization=0 onesided=true | self=[5,6,4] dim=[0,1] normalization=1 onesided=true
_fft_c2r: self=[5,6,4]c dim=[1] normalization=0 last_dim_size=10
_fft_c2c: self=[5,6,4]c dim=[1] normalization=0 forward=true | self=[5,6,4]c dim=[0,2] normalization=2 forward=false
fft_fft fft_rfft fft_ifft fft_ihfft: self=[5,6] dim=1
fft_fftshift fft_ifftshift: self=[5,6] dim=[1]
stft: self=[4,32] n_fft=8 onesided=true return_complex=true
# -- lists
_foreach_add _foreach_sub: self={[5,3];[4]} other={[5,3];[4]} | self={[5,3];[4]} scalar=1.5 | self={[5,3];[4]} scalars=[1.5,2] | self={[5,3];[4]} other=[]
_foreach_mul _foreach_div _foreach_clamp_min _foreach_clamp_max _foreach_maximum _foreach_minimum: self={[5,3];[4]} other={[5,3]+;[4]+} | self={[5,3];[4]} scalar=1.5 | self={[5,3];[4]} scalars=[1.5,2] | self={[5,3];[4]} other=[]+
_foreach_pow: self={[5,3]+;[4]+} exponent={[5,3];[4]} | self={[5,3]+;[4]+} exponent=2 | self={[5,3]+;[4]+} exponent=[1.5,2] | self=2 exponent={[5,3];[4]}
_foreach_addcmul _foreach_addcdiv: self={[5,3];[4]} tensor1={[5,3];[4]} tensor2={[5,3]+;[4]+} value=2 | self={[5,3];[4]} tensor1={[5,3];[4]} tensor2={[5,3]+;[4]+} scalars=[1.5,2] | self={[5,3];[4]} tensor1={[5,3];[4]} tensor2={[5,3]+;[4]+} scalars=[2]
_foreach_lerp: self={[5,3];[4]} tensors1={[5,3];[4]} weights={[5,3]u;[4]u} | self={[5,3];[4]} tensors1={[5,3];[4]} weight=0.3 | self={[5,3];[4]} tensors1={[5,3];[4]} weight=[0.3,0.5]
_foreach_norm _foreach_powsum: self={[5,3];[4]} ord=2 | self={[5,3];[4]} ord=1
_foreach_copy: self={[5,3];[4]} src={[5,3];[4]}
_foreach_max _foreach_zero _foreach_clone: self={[5,3];[4]}
_foreach_acos _foreach_asin _foreach_atan _foreach_abs _foreach_ceil _foreach_cos _foreach_cosh _foreach_erf _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac _foreach_neg _foreach_reciprocal _foreach_round _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sinh _foreach_tan _foreach_tanh _foreach_trunc: self={[5,3];[4]}
_foreach_lgamma _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_sqrt _foreach_rsqrt: self={[5,3]+;[4]+}
_fused_adam _fused_adamw: self={[5,3];[4]} grads={[5,3];[4]} exp_avgs={[5,3];[4]} exp_avg_sqs={[5,3]+;[4]+} max_exp_avg_sqs={} state_steps={[]of;[]of} lr=0.1 beta1=0.9 beta2=0.99 weight_decay=0.01 eps=0.001 amsgrad=false maximize=false | self={[5,3];[4]} grads={[5,3];[4]} exp_avgs={[5,3];[4]} exp_avg_sqs={[5,3]+;[4]+} max_exp_avg_sqs={} state_steps={[]of;[]of} lr=[]of beta1=0.9 beta2=0.99 weight_decay=0.01 eps=0.001 amsgrad=false maximize=false
_fused_sgd: self={[5,3];[4]} grads={[5,3];[4]} momentum_buffer_list={[5,3];[4]} weight_decay=0.01 momentum=0.9 lr=0.1 dampening=0. nesterov=false maximize=false is_first_step=false | self={[5,3];[4]} grads={[5,3];[4]} momentum_buffer_list={[5,3];[4]} weight_decay=0.01 momentum=0.9 lr=[]of dampening=0. nesterov=false maximize=false is_first_step=false
_fused_adagrad: self={[5,3];[4]} grads={[5,3];[4]} state_sums={[5,3]+;[4]+} state_steps={[]of;[]of} lr=0.1 lr_decay=0.01 weight_decay=0.01 eps=0.001 maximize=false | self={[5,3];[4]} grads={[5,3];[4]} state_sums={[5,3]+;[4]+} state_steps={[]of;[]of} lr=[]of lr_decay=0.01 weight_decay=0.01 eps=0.001 maximize=false
# -- recurrent cells
_thnn_fused_lstm_cell _thnn_fused_gru_cell: *=-
_thnn_differentiable_lstm_cell_backward: *=-
# -- what would not be a fair question
_sobol_engine_draw _sobol_engine_ff _sobol_engine_initialize_state _sobol_engine_scramble _reshape_from_tensor _rowwise_prune _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo: *=-
is_set_to set_data data _version output_nr is_leaf retain_grad requires_grad _backward record_stream: *=-
_debug_has_internal_overlap _has_same_storage_numel _efficientzerotensor _print to_dense_backward to_mkldnn: *=-
)";
}

}  // namespace dtensor::opcheck
