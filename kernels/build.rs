//! Compiles the kernels for host threads. The GPU's copy of the same headers is PTX.

fn main() {
    for path in ["include/gio", "include/pool", "src/host"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .include("include")
        .file("src/host/kernel.cpp")
        .file("src/host/pool.cpp")
        // Also in debug builds: lanes are loops, slow until they are inlined and unrolled.
        .opt_level(3)
        .warnings(true)
        .extra_warnings(true)
        // As on the device.
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        // Rings, slots and entries are words of memory that others write in units of their own.
        .flag("-fno-strict-aliasing")
        .flag_if_supported("-Wshadow")
        .flag_if_supported("-Wconversion")
        // Nothing of the C++ library is used.
        .cpp_link_stdlib(None);
    println!("cargo::rustc-check-cfg=cfg(sanitize_address)");
    if let Ok(sanitizer) = std::env::var("CARGO_CFG_SANITIZE") {
        // As Rust is. rustc links the runtime, whose functions gcc's code calls as well.
        build.flag(format!("-fsanitize={sanitizer}")).flag("-g").flag("-fno-omit-frame-pointer");
        // The one fence of the host's kernel is for kernels that leave, as those of a GPU do.
        build.flag_if_supported("-Wno-tsan");
        if sanitizer == "address" {
            // For tests that forbid it parts of their memory.
            println!("cargo::rustc-cfg=sanitize_address");
        }
    }
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        // For popcnt, which every lane asks for its rank; in every x86-64 since 2008.
        build.flag_if_supported("-mpopcnt");
    }
    build.compile("gio_host");
}
