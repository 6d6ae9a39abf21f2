//! Sets the soname of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Before 1.0, any minor version may break compatibility.
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("0.{minor}") } else { major.to_owned() };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libripieno.so.{version}");
}
