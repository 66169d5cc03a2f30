//! System call numbers and prctl values, by architecture, independent of any C header.
//!
//! Since Linux 5.1 a new call gets one number on every architecture; x32 adds its flag bit. Alpha and MIPS count from other bases and are not
//! supported: a wrong number would be some other call.
//! Source: `scripts/syscall.tbl` and `arch/*/kernel/syscalls/*.tbl` in the kernel tree, `linux/prctl.h`.

#[cfg(not(any(
    target_arch = "aarch64",
    target_arch = "arm",
    target_arch = "csky",
    target_arch = "hexagon",
    target_arch = "loongarch64",
    target_arch = "m68k",
    target_arch = "powerpc",
    target_arch = "powerpc64",
    target_arch = "riscv32",
    target_arch = "riscv64",
    target_arch = "s390x",
    target_arch = "sparc",
    target_arch = "sparc64",
    target_arch = "x86",
    target_arch = "x86_64",
)))]
compile_error!("pidfd-sys does not know this architecture's system call numbers");

/// The bit that marks an x32 call, zero elsewhere.
const ABI_BIT: libc::c_long = if cfg!(all(target_arch = "x86_64", target_pointer_width = "32")) { 0x4000_0000 } else { 0 };

/// pidfd_open(2).
pub const PIDFD_OPEN: libc::c_long = 434 | ABI_BIT;

/// pidfd_getfd(2).
pub const PIDFD_GETFD: libc::c_long = 438 | ABI_BIT;

/// prctl(2) operation that names the process which Yama lets trace the caller; the text "Yama".
pub const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;

/// [`PR_SET_PTRACER`] argument for "any process".
pub const PR_SET_PTRACER_ANY: libc::c_ulong = libc::c_ulong::MAX;

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(not(all(target_arch = "x86_64", target_pointer_width = "32")))]
    fn the_numbers_are_those_of_the_common_table() {
        assert_eq!(super::PIDFD_OPEN, 434);
        assert_eq!(super::PIDFD_GETFD, 438);
    }
}
