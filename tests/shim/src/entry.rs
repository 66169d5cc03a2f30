//! The interposed symbols: each leads to [`enter`] with its arguments and the address it was called from.
//!
//! A C library function takes at most six integer arguments, or seven (`syscall`, the last on the stack of x86-64), whatever its prototype; variadic ones
//! take theirs in the same places. So one piece of assembly serves them all: it adds the return address as an eighth argument. There is no other way
//! to it in Rust.

use core::ffi::c_long;

/// Arguments of a call; what a function does not take is garbage and stays unread.
pub(crate) type Arguments = [c_long; 7];

/// Defines the symbols and the table of their names.
macro_rules! entries {
    ($($name:ident: $failure:ident,)*) => {
        #[allow(non_camel_case_types, reason = "the functions' own names")]
        #[derive(Clone, Copy)]
        enum Index { $($name),* }

        /// All functions, in the order of their numbers.
        pub(crate) const FUNCTIONS: &[Function] = &[$(Function {
            name: match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name without NUL"),
            },
            failure: Failure::$failure,
        }),*];

        mod symbols {
            use super::Index;
            $(
                /// The function of this name.
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $name() {
                    crate::entry::enter_from_here!(crate::entry::enter::<{ Index::$name as usize }>)
                }
            )*
        }
    };
}
pub(crate) use entries;

#[cfg(target_arch = "x86_64")]
macro_rules! enter_from_here {
    ($enter:path) => {
        core::arch::naked_asm!(
            "sub rsp, 8",
            "push qword ptr [rsp + 8]",  // the return address, eighth
            "push qword ptr [rsp + 24]", // the caller's stack argument or whatever is there, seventh
            "call {enter}",
            "add rsp, 24",
            "ret",
            enter = sym $enter
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! enter_from_here {
    ($enter:path) => {
        core::arch::naked_asm!("mov x7, x30", "b {enter}", enter = sym $enter)
    };
}
pub(crate) use enter_from_here;

/// A call of function number `INDEX`, from `caller`.
#[allow(clippy::too_many_arguments, reason = "one a register")]
pub(crate) extern "C" fn enter<const INDEX: usize>(
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
    g: c_long,
    caller: usize,
) -> c_long {
    crate::gate::pass(INDEX, &[a, b, c, d, e, f, g], caller)
}
