"""What is measured, and what it must reach. A suite runs its programs and the peers' in turns and returns rows."""
from .core_suites import dispatch, instructions, memory_bound, mesh_of_one, processes, random, recurrent, redistribute, scale, sharding, step, threads
from .module_suites import experts, generation, learning, long_context, pipeline, saving

SUITES = {suite.__name__: suite for suite in (dispatch, instructions, mesh_of_one, recurrent, threads, processes, memory_bound, step, pipeline,
                                              long_context, saving, generation, learning, experts, sharding, redistribute, random, scale)}
