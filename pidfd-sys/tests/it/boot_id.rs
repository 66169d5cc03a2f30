//! boot_id: the bytes behind the text.

use core::fmt::Write;
use pidfd_sys::boot_id;

#[test]
fn it_is_the_text_without_dashes() {
    let mut hex = String::new();
    for byte in boot_id().expect("this kernel has one") {
        write!(hex, "{byte:02x}").expect("a string takes everything");
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("this kernel has one");
    assert_eq!(hex, text.trim().replace('-', ""));
    assert_eq!(boot_id(), boot_id());
}
