// Thread-local variables on the way of every operator: read without a call, since the library is loaded with the program.
#pragma once

#define DTENSOR_FAST_THREAD_LOCAL thread_local __attribute__((tls_model("initial-exec")))
