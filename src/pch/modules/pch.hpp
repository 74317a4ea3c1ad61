// What the files of the library that know modules and optimizers include, compiled once. None of our own headers.

#include "src/pch/pch.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>
