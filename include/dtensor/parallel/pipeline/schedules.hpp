// Schedules of pipelines: made by name, checked, simulated, drawn, read and written (docs/pipeline_schedules.md).
#pragma once

#include <dtensor/parallel/pipeline/csv.hpp>
#include <dtensor/parallel/pipeline/draw.hpp>
#include <dtensor/parallel/pipeline/lower.hpp>
#include <dtensor/parallel/pipeline/named.hpp>
