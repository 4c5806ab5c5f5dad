/* SPDX-License-Identifier: GPL-3.0-or-later
 * NCCL's entry points that PyTorch 2.14 is linked against and that NCCL 2.28 lacks. A single rank calls none of them;
 * whoever does gets ncclInternalError. */
enum { NCCL_INTERNAL_ERROR = 3 };
#define MISSING(name) int name(void) { return NCCL_INTERNAL_ERROR; }
MISSING(ncclCommGetUniqueId)
MISSING(ncclCommGrow)
MISSING(ncclCommMemStats)
MISSING(ncclCommResume)
MISSING(ncclCommSuspend)
MISSING(ncclGetLsaMultimemDevicePointer)
MISSING(ncclGetPeerDevicePointer)
MISSING(ncclPutSignal)
MISSING(ncclSignal)
MISSING(ncclWaitSignal)
MISSING(ncclWinGetUserPtr)
