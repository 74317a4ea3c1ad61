#pragma once

namespace dtensor::detail {

// Has libtorch keep large blocks of CPU memory (32 MB and more) for the tensors to come, in huge pages. The C library gives such blocks back
// to the system whatever it is told, so that every large result is faulted in anew, page by page. A kept block is the system's to take when
// memory is short (MADV_FREE); at most an eighth of the machine's memory is kept. Once is enough; Linux only.
void keep_large_blocks();

}  // namespace dtensor::detail
