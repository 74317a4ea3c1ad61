// Keeps large blocks of freed tensors.
#pragma once

namespace dtensor::detail {

// Makes libtorch keep freed blocks of CPU memory of 8 MB and more for later tensors, in huge pages. The C library uses small pages, and
// always returns blocks of 32 MB and more to the system, so every such result would be faulted in anew. Keeps at most an eighth of the
// machine's memory; beyond a 64th, the system may take it when memory is short (MADV_FREE). Call it once; Linux only.
void keep_large_blocks();

}  // namespace dtensor::detail
