// More sample arguments: operators that few call by name, and integer operands with meaning. See samples_table.cpp.
#include "tools/opcheck/sample.hpp"

namespace dtensor::opcheck {

const char* rare_samples() {
  return R"(
# -- integers with meaning: pivots, offsets, lengths, counts
linalg_lu_solve: LU=[5,4,4]d pivots=[5,4]v B=[5,4,3] | LU=[5,5]d pivots=[5]v B=[3,5] left=false | LU=[1,4,4]d pivots=[1,4]v B=[5,4,3]
lu_solve: self=[5,4,3] LU_data=[5,4,4]d LU_pivots=[5,4]v | self=[5,2] LU_data=[5,5]d LU_pivots=[5]v
lu_unpack: LU_data=[5,4,4]d LU_pivots=[5,4]v | LU_data=[6,4] LU_pivots=[4]v
linalg_ldl_solve: LD=[5,4,4]d pivots=[5,4]v B=[5,4,3] | LD=[5,5]d pivots=[5]v B=[5,1]
_embedding_bag _embedding_bag_forward_only embedding_bag: weight=[7,4] indices=[6]<7 offsets=[3]^6 | weight=[7,4] indices=[6]<7 offsets=[5]^6 mode=1 | weight=[7,4] indices=[6]<7 offsets=[1]^6 mode=2 | weight=[7,4] indices=[6]<7 offsets=[3]^6 per_sample_weights=[6]u | weight=[7,4] indices=[6]<7j offsets=[3]^6j
_embedding_bag_backward: grad=[3,4] indices=[6]<7 offsets=[3]^6 offset2bag=[6]^2 bag_size=[3]/6 maximum_indices=[3,4]<7 num_weights=7 scale_grad_by_freq=false mode=0 sparse=false per_sample_weights=- | grad=[3,4] indices=[6]<7 offsets=[3]^6 offset2bag=[6]^2 bag_size=[3]/6 maximum_indices=[3,4]<7 num_weights=7 scale_grad_by_freq=false mode=1 sparse=false per_sample_weights=- | grad=[3,4] indices=[6]<7 offsets=[3]^6 offset2bag=[6]^2 bag_size=[3]/6 maximum_indices=[3,4]<7 num_weights=7 scale_grad_by_freq=false mode=2 sparse=false per_sample_weights=-
_embedding_bag_dense_backward: grad=[3,4] indices=[6]<7 offset2bag=[6]^2 bag_size=[3]/6 maximum_indices=[3,4]<7 num_weights=7 scale_grad_by_freq=false mode=0 per_sample_weights=- | grad=[3,4] indices=[6]<7 offset2bag=[6]^2 bag_size=[3]/6 maximum_indices=[3,4]<7 num_weights=7 scale_grad_by_freq=true mode=0 per_sample_weights=[6]u
_embedding_bag_per_sample_weights_backward: grad=[3,4] weight=[7,4] indices=[6]<7 offsets=[3]^6 offset2bag=[6]^2 mode=0
segment_reduce: data=[6,3] reduce=sum lengths=[2]/6 axis=0 | data=[6,3] reduce=max lengths=[3]/6 axis=0 | data=[6] reduce=mean lengths=[4]/6 axis=0 initial=0.5
_segment_reduce_backward: grad=[2,3] output=[2,3] data=[6,3] reduce=sum lengths=[2]/6 | grad=[2,3] output=[2,3] data=[6,3] reduce=mean lengths=[2]/6
repeat_interleave: self=[5,3] repeats=[5]<3 dim=0 | self=[5,3] repeats=[3]<4 dim=1 | self=[5,3] repeats=[1]<4 dim=0 | self=[6] repeats=[6]<3 | self=[5] repeats=[]<4 | repeats=[5]<3j
_ctc_loss ctc_loss: log_probs=[7,3,5] targets=[3,2]<4 input_lengths=[7,7,7] target_lengths=[2,2,1] blank=4 | log_probs=[7,3,5] targets=[3,2]<4 input_lengths=[3]oi target_lengths=[3]oi blank=4 | log_probs=[1,3,5] targets=[3,1]<4 input_lengths=[3]oi target_lengths=[3]oi blank=4 | log_probs=[7,3,5] targets=[5]<4 input_lengths=[7,6,5] target_lengths=[2,2,1] blank=4
_ctc_loss_backward: grad=[3] log_probs=[7,3,5] targets=[3,2]<4 input_lengths=[7,7,7] target_lengths=[2,2,2] neg_log_likelihood=[3]+ log_alpha=[3,7,5] blank=4 | grad=[3] log_probs=[7,3,5] targets=[3,2]<4 input_lengths=[3]oi target_lengths=[3]oi neg_log_likelihood=[3]+ log_alpha=[3,7,3] blank=4
_pack_padded_sequence: input=[5,3,4] lengths=[3]<5r batch_first=false | input=[3,5,4] lengths=[3]<5r batch_first=true
_pack_padded_sequence_backward: grad=[4,6] input_size=[5,1,6] batch_sizes=[4]oi batch_first=false
_pad_packed_sequence: data=[4,6] batch_sizes=[4]oi batch_first=false padding_value=0 total_length=5
bincount: self=[10]q | self=[10]<6 weights=[10] minlength=9 | self=[10]<6j
binomial: count=[5,3]q prob=[5,3]u
narrow: self=[6,4] dim=0 start=[]<2 length=3
tensor_split: self=[7,4] sections=3 dim=0 | self=[7,4] indices=[2,5] dim=0 | self=[7,4] tensor_indices_or_sections=[2]^7 dim=0
# -- recurrent cells
lstm_cell: input=[6,4] hx={[6,5];[6,5]} w_ih=[20,4] w_hh=[20,5] b_ih=[20] b_hh=[20]
gru_cell: input=[6,4] hx=[6,5] w_ih=[15,4] w_hh=[15,5] b_ih=[15] b_hh=[15]
rnn_tanh_cell rnn_relu_cell: input=[6,4] hx=[6,5] w_ih=[5,4] w_hh=[5,5] b_ih=[5] b_hh=[5]
lstm: input=[3,6,4] hx={[1,6,5];[1,6,5]} params={[20,4];[20,5];[20];[20]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false batch_first=false | data=[4,6] batch_sizes=[4]oi hx={[1,1,5];[1,1,5]} params={[20,6];[20,5];[20];[20]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false
gru: input=[3,6,4] hx=[1,6,5] params={[15,4];[15,5];[15];[15]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false batch_first=false | data=[4,6] batch_sizes=[4]oi hx=[1,1,5] params={[15,6];[15,5];[15];[15]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false
rnn_tanh rnn_relu: input=[3,6,4] hx=[1,6,5] params={[5,4];[5,5];[5];[5]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false batch_first=false | data=[4,6] batch_sizes=[4]oi hx=[1,1,5] params={[5,6];[5,5];[5];[5]} has_biases=true num_layers=1 dropout=0. train=true bidirectional=false
# -- derivatives
_convolution_double_backward: ggI=[4,6,9] ggW=[4,6,3] ggb=[4] gO=[4,4,9] weight=[4,6,3] self=[4,6,9] stride=[1] padding=[1] dilation=[1] transposed=false output_padding=[0] groups=1 output_mask=[true,true,true]
_batch_norm_impl_index_backward: impl_index=0 input=[6,3,4] grad_output=[6,3,4] weight=[3] running_mean=[3] running_var=[3]+ save_mean=[3] save_var_transform=[3]+ train=true eps=0.001 output_mask=[true,true,true] reservedSpace=[0]
_pdist_backward: grad=[15] self=[6,4] p=2. pdist=[15]+
fractional_max_pool3d_backward: grad_output=[2,3,3,2,2] self=[2,3,6,4,4] kernel_size=[2,2,2] output_size=[3,2,2] indices=[2,3,3,2,2]<96
glu_jvp: glu=[3,4] x=[6,4] dx=[6,4] dim=0
glu_backward_jvp: grad_x=[6,4] grad_glu=[3,4] x=[6,4] dgrad_glu=[3,4] dx=[6,4] dim=0
affine_grid_generator_backward: grad=[4,5,6,2] size=[4,3,5,6] align_corners=false
matrix_exp_backward: self=[5,4,4] grad=[5,4,4]
trace_backward: grad=[] sizes=[5,4]
_slow_conv2d_backward: grad_output=[4,4,7,5] self=[4,6,7,5] weight=[4,6,3,3] kernel_size=[3,3] stride=[1,1] padding=[1,1] output_mask=[true,true,true] | grad_output=[4,4,7,5] self=[4,6,7,5] weight=[4,6,3,3] kernel_size=[3,3] stride=[1,1] padding=[1,1]
# -- quantization that is trained
fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask: self=[5,3] scale=0.1 zero_point=0 quant_min=-8 quant_max=7 | self=[5,3] scale=[1]+ zero_point=[1]oj quant_min=-8 quant_max=7
fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask: self=[5,3]g scale=[3]+g zero_point=[3]oj axis=1 quant_min=-8 quant_max=7
_fake_quantize_per_tensor_affine_cachemask_tensor_qparams: self=[5,3]g scale=[1]+g zero_point=[1]oj fake_quant_enabled=[1]oi quant_min=-8 quant_max=7
_fake_quantize_learnable_per_tensor_affine: self=[5,3]g scale=[1]+g zero_point=[1]og quant_min=-8 quant_max=7
_fake_quantize_learnable_per_tensor_affine_backward: grad=[5,3]g self=[5,3]g scale=[1]+g zero_point=[1]og quant_min=-8 quant_max=7
_fake_quantize_learnable_per_channel_affine: self=[5,3]g scale=[3]+g zero_point=[3]og axis=1 quant_min=-8 quant_max=7
_fake_quantize_learnable_per_channel_affine_backward: grad=[5,3]g self=[5,3]g scale=[3]+g zero_point=[3]og axis=1 quant_min=-8 quant_max=7
fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional: self=[5,3]g observer_on=[1]oi fake_quant_on=[1]oi running_min=[1]g running_max=[1]+g scale=[1]+g zero_point=[1]oj averaging_const=0.01 quant_min=0 quant_max=255 ch_axis=0
# -- the rest
_amp_foreach_non_finite_check_and_unscale _amp_non_finite_check_and_unscale: self={[5,3]g;[4]g} found_inf=[1]og inv_scale=[1]og
_amp_update_scale: self=[1]og growth_tracker=[1]oj found_inf=[1]og scale_growth_factor=2. scale_backoff_factor=0.5 growth_interval=2
_assert_async _functional_assert_async: self=[]o
_local_scalar_dense item is_nonzero: self=[] | self=[1]
_convolution_mode: input=[4,6,9] weight=[4,6,3] bias=[4] stride=[1] padding=same dilation=[1] groups=1
conv1d: input=[4,6,9] weight=[4,6,3] bias=[4] | input=[4,6,9] weight=[4,6,3] bias=[4] padding=same
conv2d: input=[4,6,7,5] weight=[4,6,3,3] bias=[4] | input=[4,6,7,5] weight=[4,6,3,3] bias=[4] padding=valid
conv3d: input=[2,3,5,4,3] weight=[2,3,3,1,2] bias=[2] | input=[2,3,5,4,3] weight=[2,3,3,1,2] bias=[2] padding=same
conv_transpose3d: input=[2,3,4,3,3] weight=[3,2,2,2,2] bias=[2]
_pad_circular: self=[4,3,6] pad=[1,2]
_pad_enum: self=[4,3,6] pad=[1,2] mode=1
_trilinear: i1=[6,3] i2=[5,3,4] i3=[6,4] expand1=[1,3] expand2=[0] expand3=[1,2] sumdim=[2,3]
_weight_norm: v=[6,4] g=[6,1] dim=0
_native_multi_head_attention: query=[2,5,8]g key=[2,5,8]g value=[2,5,8]g embed_dim=8 num_head=2 qkv_weight=[24,8]g qkv_bias=[24]g proj_weight=[8,8]g proj_bias=[8]g
_transform_bias_rescale_qkv: qkv=[4,5,24] qkv_bias=[24] num_heads=2
_symeig_helper: self=[5,4,4]d eigenvectors=true upper=true
histogram: self=[20] bins=5 range=[-2,2] | self=[20] bins=[5]s
_histogramdd_from_bin_cts: self=[6,3] bins=[2,3,4]
_histogramdd_from_bin_tensors: self=[6,2] bins={[4]s;[3]s}
histogramdd: self=[6,3] bins=[2,3,4] | self=[6,2] bins={[4]s;[3]s} | self=[6,2] bins=3
gradient: self=[6,4] | self=[6,4] spacing=1.5 dim=0 | self=[6,4] spacing=[1.5,2] dim=[0,1] | self=[6,4] spacing={[6];[4]} | self=[6,4] spacing={[6]} dim=0 | self=[6,4] spacing={[6];[4]} dim=[0,1]
istft: self=[5,9]c n_fft=8
layer_norm: input=[6,3,4] normalized_shape=[4] weight=[4] bias=[4]
linalg_cond: self=[5,4,4]d | self=[5,4,4]d p=2 | self=[5,4,4]d p=fro
linalg_eigh: self=[5,4,4]d | A=[5,4,4]d
linalg_matrix_norm: self=[3,5,4] ord=fro | self=[3,5,4] ord=2 | A=[3,5,4] ord=1
linalg_norm: self=[5,4] | self=[5,4] ord=2 | self=[5,4] ord=fro
linalg_pinv pinverse: self=[5,4,3] | self=[5,4,3] atol=- rtol=- hermitian=false | self=[5,4,3] rcond=0.01 | self=[5,4,3] rcond=[5]u
linalg_tensorinv: self=[2,3,6] ind=2
meshgrid: tensors={[5];[3]} | tensors={[5];[3]} indexing=xy
movedim moveaxis: self=[5,3,4] source=[0] destination=[2] | self=[5,3,4] source=0 destination=2
msort: self=[5,3] | self=[7]
norm: self=[5,3,4] p=2 | self=[5,3,4] p=3 dim=[0] keepdim=false | self=[5,3] p=1 dim=[1] keepdim=true | self=[5,3] p=1.5 dim=[0] keepdim=true dtype=double | self=[5,3] p=2 dtype=double
nuclear_norm: self=[5,4] | self=[5,4,3] dim=[0,1]
normal: mean=[5,3] std=[5,3]+ | mean=0.5 std=[5,3]+ | mean=[5,3] std=0.5 | mean=0.5 std=2. size=[5,3] | self=[5,3] mean=0.5 std=2. | self=[5,3]
randint: high=10 size=[5,3] | low=2 high=10 size=[5,3]
to: self=[5,3] dtype=float | self=[5,3] other=[5,3]f | self=[5,3] device=cpu dtype=float
split: self=[6,4] split_size=3 dim=0 | self=[5,4] split_size=2 dim=0 | self=[6,4] split_size=2 dim=1 | self=[6,4] split_size=[2,4] dim=0
unflatten_dense_tensors: flat=[7] tensors={[3];[4]}
reshape: self=[6,4] shape=[3,8] | self=[6,4] shape=[24] | self=[5,4]t shape=[20] | self=[0,4] shape=[2,0]
upsample_linear1d: self=[4,3,5] output_size=[10] align_corners=false | input=[4,3,5] output_size=[10] align_corners=false scale_factors=none
upsample_nearest2d _upsample_nearest_exact2d: self=[4,3,5,4] output_size=[10,8] | input=[4,3,5,4] output_size=[10,8] scale_factors=none
upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa: self=[4,3,5,4] output_size=[10,8] align_corners=false | input=[4,3,5,4] output_size=[10,8] align_corners=false scale_factors=none
upsample_nearest3d _upsample_nearest_exact3d: self=[2,3,3,4,2] output_size=[6,8,4] | input=[2,3,3,4,2] output_size=[6,8,4] scale_factors=none
upsample_trilinear3d: self=[2,3,3,4,2] output_size=[6,8,4] align_corners=false | input=[2,3,3,4,2] output_size=[6,8,4] align_corners=false scale_factors=none
)";
}

}  // namespace dtensor::opcheck
