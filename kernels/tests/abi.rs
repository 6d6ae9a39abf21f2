//! The C++ and the Rust half of the interface lay out the same structs.

#[test]
fn both_halves_agree_on_every_field() {
    let rust = gio_uring::abi::layout_table();
    let cpp = gio_kernels::layout_table();
    for (ours, theirs) in rust.iter().zip(&cpp) {
        assert_eq!(ours, theirs, "gio-uring/src/abi.rs and kernels/include/gio/abi.h differ");
    }
    assert_eq!(rust.len(), cpp.len(), "one half has more fields");
    assert_eq!(gio_uring::abi::VERSION, gio_kernels::abi_version());
}
