/* Stands for a user's program in the commands of the documents: it builds only with the library's header, and ends well only with the library itself. */
#include <cuda_ipc.h>

int main(void)
{
    return cuda_ipc_version() == 0;
}
