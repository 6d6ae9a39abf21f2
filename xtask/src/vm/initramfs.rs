//! The archive that the guest boots from: busybox, the VFIO modules, the programs, and `/init`.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::vm::image;
use crate::{child, folder};

const INIT: &str = include_str!("init.sh");
/// Folders and files of the kernel's modules that contain all VFIO modules in any kernel version.
const MODULES: &[&str] = &["kernel/drivers/vfio", "kernel/virt/lib", "kernel/drivers/iommu"];

/// Always packs the archive again, which is faster than checking whether it is current.
pub fn pack(folder: &Path, programs: &[PathBuf]) -> Result<PathBuf> {
    let packages = folder.join("packages");
    // Static; the host uses it, too, so that no other tools are needed.
    let busybox = either(&packages.join("busybox"), "bin/busybox")?;
    let tree = folder.join("initramfs");
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    let bin = tree.join("bin");
    fs::create_dir_all(&bin)?;
    fs::copy(&busybox, bin.join("busybox"))?;
    for program in programs {
        let name = program.file_name().unwrap_or_default();
        // Stripped, because the guest reads all of it into memory at boot.
        let mut strip = Command::new("strip");
        child::output(strip.arg("-o").arg(bin.join(name)).arg(program))?;
        image::copy_libraries(program, &tree)?;
    }
    let modules = either(&packages.join("kernel"), "lib/modules")?;
    copy_all_modules(&busybox, &folder::only_file(&modules, "")?, &tree)?;
    fs::write(tree.join("init"), INIT)?;
    fs::set_permissions(tree.join("init"), Permissions::from_mode(0o755))?;
    let archive = folder.join("initramfs.cpio");
    archive_tree(&busybox, &tree, &archive)?;
    Ok(archive)
}

/// Returns the path in a package that may have it below `usr`.
fn either(package: &Path, path: &str) -> Result<PathBuf> {
    let found = [package.join(path), package.join("usr").join(path)];
    let found = found.into_iter().find(|path| path.exists());
    found.with_context(|| format!("{} has no {path}", package.display()))
}

fn copy_all_modules(busybox: &Path, modules: &Path, tree: &Path) -> Result<()> {
    let version = modules.file_name().unwrap_or_default();
    let to = tree.join("lib/modules").join(version);
    for part in MODULES.iter().filter(|part| modules.join(part).exists()) {
        copy_modules(busybox, &modules.join(part), &to.join(part))?;
    }
    // depmod requires both.
    for name in ["modules.builtin", "modules.order"] {
        fs::copy(modules.join(name), to.join(name))?;
    }
    let mut depmod = Command::new(busybox);
    child::output(depmod.arg("depmod").arg("-b").arg(tree).arg(version)).map(drop)
}

fn copy_modules(busybox: &Path, from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)?.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() {
            copy_modules(busybox, &path, &to.join(name))?;
        } else if path.extension().is_some_and(|end| end == "xz") {
            let plain = File::create(to.join(name).with_extension(""))?;
            child::output(Command::new(busybox).arg("xzcat").arg(&path).stdout(plain))?;
        } else {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Creates an uncompressed archive: QEMU reads it faster than the guest would decompress it.
fn archive_tree(busybox: &Path, tree: &Path, archive: &Path) -> Result<()> {
    let mut names = Vec::new();
    list(tree, tree, &mut names)?;
    names.sort();
    let mut cpio = Command::new(busybox)
        .args(["cpio", "-o", "-H", "newc", "-R", "0:0"])
        .current_dir(tree)
        .stdin(Stdio::piped())
        .stdout(File::create(archive)?)
        .stderr(Stdio::null())
        .spawn()
        .context("cannot run busybox cpio")?;
    if let Some(mut input) = cpio.stdin.take() {
        input.write_all(names.join("\n").as_bytes())?;
        input.write_all(b"\n")?;
    }
    let status = cpio.wait()?;
    if !status.success() {
        bail!("packing the initramfs failed ({status})");
    }
    Ok(())
}

fn list(root: &Path, folder: &Path, names: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        names.push(path.strip_prefix(root)?.to_string_lossy().into_owned());
        if path.is_dir() {
            list(root, &path, names)?;
        }
    }
    Ok(())
}
