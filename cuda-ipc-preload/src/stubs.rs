//! The interposed names: each is a few instructions that ask [`crate::route`] where to go on, with the caller's arguments untouched.
//!
//! A stub is a naked function: it sees the return address of its caller as it is, keeps all argument registers, asks for a target and jumps there. So a call
//! that is none of our business goes to the driver as if we were not there, stack arguments included, and nothing here needs to know a signature.
//!
//! # Safety
//! The unsafe here is the assembly. It follows the calling convention of its architecture: argument registers are saved and restored around one call of
//! `route`, the stack is 16-byte aligned at that call, and the jump leaves stack and link register as the caller set them, so the target returns to the
//! caller. None of the interposed functions takes or returns floating point values.

#![allow(unsafe_code)]
#![allow(non_snake_case, missing_docs, reason = "the driver's names")]

use crate::names::Name;
use crate::route::route;

macro_rules! stubs {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            stub_body!(Name::$name as u32)
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
macro_rules! stub_body {
    ($index:expr) => {
        core::arch::naked_asm!(
            ".cfi_startproc",
            "endbr64",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "push rdx", ".cfi_adjust_cfa_offset 8",
            "push rcx", ".cfi_adjust_cfa_offset 8",
            "push r8", ".cfi_adjust_cfa_offset 8",
            "push r9", ".cfi_adjust_cfa_offset 8",
            "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
            // The return address: above seven words.
            "mov rdi, [rsp + 56]",
            "mov esi, {index}",
            "call {route}",
            "add rsp, 8", ".cfi_adjust_cfa_offset -8",
            "pop r9", ".cfi_adjust_cfa_offset -8",
            "pop r8", ".cfi_adjust_cfa_offset -8",
            "pop rcx", ".cfi_adjust_cfa_offset -8",
            "pop rdx", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            index = const $index,
            route = sym route,
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! stub_body {
    ($index:expr) => {
        core::arch::naked_asm!(
            "bti c",
            "stp x29, x30, [sp, #-80]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "mov x0, x30",
            "mov w1, #{index}",
            "bl {route}",
            "mov x16, x0",
            "ldp x0, x1, [sp, #16]",
            "ldp x2, x3, [sp, #32]",
            "ldp x4, x5, [sp, #48]",
            "ldp x6, x7, [sp, #64]",
            "ldp x29, x30, [sp], #80",
            "br x16",
            index = const $index,
            route = sym route,
        )
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the preload library has stubs for x86-64 and aarch64 only");

crate::names::for_each_name!(stubs);
