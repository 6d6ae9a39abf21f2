//! Gives the shared library the name that programs look for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Before 1.0 a minor version may break anything.
    let (major, minor) = (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"));
    let version = if major == "0" { format!("0.{minor}") } else { major.to_owned() };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libripieno.so.{version}");
}
