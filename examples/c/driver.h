/*
 * The few functions of the CUDA driver that the examples call, written down from its manual, so that they build without the CUDA toolkit. A program that has it
 * includes <cuda.h> instead.
 */
#ifndef EXAMPLE_DRIVER_H
#define EXAMPLE_DRIVER_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef void *CUcontext;

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

#define CU_MEM_ALLOCATION_TYPE_PINNED 1
#define CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR 1
#define CU_MEM_LOCATION_TYPE_DEVICE 1
#define CU_MEM_ACCESS_FLAGS_PROT_READWRITE 3

int cuInit(unsigned int flags);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxSetCurrent(CUcontext context);
int cuCtxSynchronize(void);
int cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags);
int cuMemRelease(CUmemGenericAllocationHandle handle);
int cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags);
int cuMemAddressFree(CUdeviceptr address, size_t size);
int cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags);
int cuMemUnmap(CUdeviceptr address, size_t size);
int cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count);
int cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size);
int cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size);

#ifdef __cplusplus
}
#endif

/* Ends the program if a driver call fails. */
static inline void check_cuda(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "%s: CUresult %d\n", what, result);
        exit(1);
    }
}

#define CUDA(call) check_cuda((call), #call)

/* Makes the primary context of the first device current. */
static inline void open_driver(void)
{
    CUcontext context;

    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
}

/* The byte that the examples put at an offset. */
static inline unsigned char pattern(size_t offset)
{
    return (unsigned char)(offset * 31 + (offset >> 12) * 7 + 1);
}

#endif
