// What every file of the fuzzer includes, compiled once.
#pragma once

#include <ATen/ATen.h>

#include <fmt/format.h>

#include <functional>
#include <map>
#include <string>
