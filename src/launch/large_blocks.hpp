#pragma once

namespace dtensor::detail {

// Has libtorch keep large blocks of CPU memory (8 MB and more) for the tensors to come, in huge pages. The C library lies them in small pages,
// and gives those of 32 MB and more back to the system whatever it is told, so that every such result is faulted in anew. At most an eighth
// of the machine's memory is kept; beyond a 64th it is the system's to take when memory is short (MADV_FREE). Once is enough; Linux only.
void keep_large_blocks();

}  // namespace dtensor::detail
