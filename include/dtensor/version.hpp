// The version of the library that these headers belong to. The build takes it from here.
//
//   #if DTENSOR_VERSION >= DTENSOR_MAKE_VERSION(0, 2, 0)
#pragma once

#define DTENSOR_MAKE_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))

#define DTENSOR_VERSION_MAJOR 0
#define DTENSOR_VERSION_MINOR 1
#define DTENSOR_VERSION_PATCH 0
#define DTENSOR_VERSION DTENSOR_MAKE_VERSION(DTENSOR_VERSION_MAJOR, DTENSOR_VERSION_MINOR, DTENSOR_VERSION_PATCH)
#define DTENSOR_VERSION_TEXT "0.1.0"
