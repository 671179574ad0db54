; GPU-initiated puts for Triton kernels, between Triton's calls and the C functions of NCCL's device
; code (nccl_device_wrapper.h and nccl_device/gin.h, in NCCL's wheel). Triton links this text and
; then NCCL's libnccl_device.bc, and inlines both.
;
; NCCL passes C++ references as pointers, and structures by value. Numbers below are enumerators:
;   ncclGinSignalInc = 0; thread scopes of libcu++: system 0, thread 10; memory orders of C++.
target triple = "nvptx64-nvidia-cuda"

; ncclTeam: number of ranks, this rank, stride between the ranks.
%struct.ncclTeam = type { i32, i32, i32 }
; ncclCoopAny: 16 bytes of storage, and the table of its functions.
%struct.ncclCoopAny = type { [16 x i8], ptr }
; ncclGin_C has 48 bytes, and ncclGin_C_init fills it; the rest is room.
%room.ncclGin_C = type [64 x i8]

declare void @ncclGin_C_init(ptr, i32, ptr, i32)
declare i32 @ncclDevComm_Rank(ptr)
declare i32 @ncclDevComm_NRanks(ptr)
declare void @ncclCoopAnyInitThread(ptr)
declare void @ncclGinPut(ptr, ptr byval(%struct.ncclTeam), i32, ptr, i64, ptr, i64, i64, i1 zeroext, i32, i32, i64, i1 zeroext, i32, ptr byval(%struct.ncclCoopAny), i1 zeroext, ptr, i32, i32)
declare i64 @ncclGinReadSignal(ptr, i32, i32, i32)
declare i64 @ncclGinReadCounter(ptr, i32, i32, i32)
declare void @ncclGinResetCounter(ptr, i32)
declare ptr @ncclGinGetSignalShadowPtr(ptr, i32)
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()

; Open context 0 of a device communicator. All back ends are allowed (-1): the communicator says
; which one it has.
define internal void @interlace_gin_open(ptr %net, i64 %comm) alwaysinline {
  %pointer = inttoptr i64 %comm to ptr
  call void @ncclGin_C_init(ptr %net, i32 -1, ptr %pointer, i32 0)
  ret void
}

; Thread 0 of the program puts; the others do nothing. The put increments the peer's signal, and a
; counter of this rank unless that is negative. The thread's stores, and those that a barrier has
; brought into its past, are released at system scope: given scope 10 (thread), required 0 (system).
define i32 @interlace_gin_put(i64 %comm, i32 %peer, i64 %target, i64 %target_start, i64 %source, i64 %source_start, i64 %bytes, i32 %signal, i32 %counter) alwaysinline {
entry:
  %net = alloca %room.ncclGin_C, align 8
  %team = alloca %struct.ncclTeam, align 4
  %coop = alloca %struct.ncclCoopAny, align 8
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %put, label %done

put:
  %pointer = inttoptr i64 %comm to ptr
  %target_window = inttoptr i64 %target to ptr
  %source_window = inttoptr i64 %source to ptr
  call void @interlace_gin_open(ptr %net, i64 %comm)
  %ranks = call i32 @ncclDevComm_NRanks(ptr %pointer)
  %rank = call i32 @ncclDevComm_Rank(ptr %pointer)
  store i32 %ranks, ptr %team, align 4
  %rank_field = getelementptr inbounds %struct.ncclTeam, ptr %team, i32 0, i32 1
  store i32 %rank, ptr %rank_field, align 4
  %stride_field = getelementptr inbounds %struct.ncclTeam, ptr %team, i32 0, i32 2
  store i32 1, ptr %stride_field, align 4
  call void @ncclCoopAnyInitThread(ptr %coop)
  %counts = icmp sge i32 %counter, 0
  call void @ncclGinPut(ptr %net, ptr byval(%struct.ncclTeam) %team, i32 %peer, ptr %target_window, i64 %target_start, ptr %source_window, i64 %source_start, i64 %bytes, i1 zeroext true, i32 %signal, i32 0, i64 1, i1 zeroext %counts, i32 %counter, ptr byval(%struct.ncclCoopAny) %coop, i1 zeroext false, ptr null, i32 10, i32 0)
  br label %done

done:
  ret i32 0
}

; Read a signal: the number of puts with it that have arrived. Order 0 is relaxed, 2 acquire.
define i64 @interlace_gin_signal(i64 %comm, i32 %signal, i32 %order) alwaysinline {
  %net = alloca %room.ncclGin_C, align 8
  call void @interlace_gin_open(ptr %net, i64 %comm)
  %value = call i64 @ncclGinReadSignal(ptr %net, i32 %signal, i32 64, i32 %order)
  ret i64 %value
}

; Read a counter: the number of puts with it whose source has been read.
define i64 @interlace_gin_counter(i64 %comm, i32 %counter, i32 %order) alwaysinline {
  %net = alloca %room.ncclGin_C, align 8
  call void @interlace_gin_open(ptr %net, i64 %comm)
  %value = call i64 @ncclGinReadCounter(ptr %net, i32 %counter, i32 64, i32 %order)
  ret i64 %value
}

; Set a counter to 0, by thread 0. No put with it may be under way.
define i32 @interlace_gin_reset_counter(i64 %comm, i32 %counter) alwaysinline {
entry:
  %net = alloca %room.ncclGin_C, align 8
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %reset, label %done

reset:
  call void @interlace_gin_open(ptr %net, i64 %comm)
  call void @ncclGinResetCounter(ptr %net, i32 %counter)
  br label %done

done:
  ret i32 0
}

; Return the address of a signal's shadow, uint64 of this rank that NCCL sets to 0 and never uses.
define i64 @interlace_gin_shadow(i64 %comm, i32 %signal) alwaysinline {
  %net = alloca %room.ncclGin_C, align 8
  call void @interlace_gin_open(ptr %net, i64 %comm)
  %shadow = call ptr @ncclGinGetSignalShadowPtr(ptr %net, i32 %signal)
  %address = ptrtoint ptr %shadow to i64
  ret i64 %address
}
