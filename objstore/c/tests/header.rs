//! Checks that cbindgen's output matches the committed header; `cargo xtask c header` writes it.

use std::{env, fs, path::Path};

#[test]
fn the_header_is_that_of_the_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::generate_with_config(here, config).unwrap().write(&mut made);
    let header = here.join("include/ripieno.h");
    if env::var_os("RIPIENO_WRITE_HEADER").is_some() {
        fs::write(&header, &made).unwrap();
    }
    let committed = fs::read(&header).unwrap();
    assert!(committed == made, "{} is stale: run `cargo xtask c header`", header.display());
}
