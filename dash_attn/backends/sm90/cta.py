"""The shape of one CTA (thread block), which is the same in every build of the kernel. Pure Python.

A CTA is one worker. It fills an SM, and its warps have roles:

    warp 0       producer      reads the Program, or draws the tickets of a pack, and starts every load
    warps 1, 2   dQ writers    add each dQ contribution in its turn. At the end of a chain they store dV. At the end of
                               a cut chain they add its dV and dK in their turn
    warp 3       dK writer     stores dK, unless chains are cut. Where the product dP^T subtracts delta, it makes that
                               operand for every task
    warps 4-11   consumers     two warpgroups, which compute the five products of every task
"""

from __future__ import annotations

SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA may use on sm_90
REGISTER_FILE = 65_536  # 32-bit registers of one SM

WARP = 32  # threads
WARPGROUP = 128  # threads
CONSUMER_WARPGROUPS = 2  # each owns half of a tile's kv rows, so P^T and dS^T stay in registers
CONSUMER_THREADS = WARPGROUP * CONSUMER_WARPGROUPS
CONSUMER_WARPS = CONSUMER_THREADS // WARP
THREADS = WARPGROUP + CONSUMER_THREADS  # the producer and the writers share the first warpgroup

TILE_N = 64 * CONSUMER_WARPGROUPS  # keys of a tile: a warpgroup's products have 64 rows
STAGES = 2  # ring slots of Q, of dO and of dS. Two slots of dS need one consumer barrier a task
DQ_SLOTS = 2  # staged dQ tiles
WRITERS = DQ_SLOTS  # dQ writer warps
HALF_SLOTS = DQ_SLOTS * CONSUMER_WARPGROUPS  # each slot has a half for each consumer warpgroup
CHAINS_IN_FLIGHT = 2  # the chain that runs, and the next one, whose first loads have started
RING = 16  # entries of the task ring, a power of two (see barriers.ring_depth_needed)

CONSUMER_REGS = 240  # registers of a consumer thread
WORKER_REGS = 24  # registers of a producer or writer thread
# Registers that the CTA owns from its launch on: equal shares in steps of 8. setmaxnreg moves registers between the
# warps of a CTA. It cannot add any: a warp that asks for more than there are waits forever.
LAUNCH_REGS = REGISTER_FILE // THREADS // 8 * 8 * THREADS
