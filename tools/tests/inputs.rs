//! Unusable files given to flags. No command blocks, and none reads without a limit; an error
//! of an output file is reported before any work.

use crate::store_dir;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::builder::ValueParser;
use ripieno_testkit::WATCHDOG;
use store_dir::{FORMAT, Place, text};

/// Memory limit of a command that refuses a file.
const RSS_BYTES_MAX: u64 = 512 << 20;

/// Every argument that names a file: the command, the argument, and a command line that reaches the
/// file, which is `@`. `%` is a store directory, `+` an empty directory, `=` a file of layer times.
const ARGUMENTS: &[(&str, &str, &str)] = &[
    ("replay", "trace", "--trace @"),
    ("replay", "path", "--path @"),
    ("pace", "trace", "--trace @"),
    ("pace", "layers", "--layers @"),
    ("pace", "slack", "--slack @"),
    ("bench raw", "path", "--path @"),
    ("bench raw", "block", "--block @"),
    ("bench raw", "html", "--html @"),
    ("bench layers", "html", "--html @"),
    ("bench layers", "trace", "--trace @"),
    ("bench layers", "path", "--path @"),
    ("bench table", "out", "--pace --model mini --out @"),
    ("bench table", "layer_times", "--layer-times @"),
    ("bench table", "against", "--layer-times = --against @"),
    ("bench table", "trace", "--trace @"),
    ("bench table", "path", "--path @"),
    ("format", "path", "--path @ --capacity 16MiB"),
    ("format", "block", "--path + --block @"),
    ("format", "undo_file", "--path % --overwrite store --undo-file @"),
    ("format", "undo", "--path % --undo @"),
    ("inspect", "path", "--path @"),
    ("fsck", "path", "--path @"),
    ("scrub", "path", "--path @"),
    ("sim", "names", "@"),
    ("sim", "layers", "l-eval --layers @"),
    ("sim", "html", "tutti-13 --html @"),
    ("sim plan", "name", "@"),
    ("sim plan", "layers", "l-eval --layers @"),
    ("sim plan", "html", "l-eval --html @"),
    ("sim cluster", "name", "@"),
    ("sim cluster", "layers", "l-eval --layers @"),
    ("sim cluster", "html", "l-eval --html @"),
    ("man", "dir", "@"),
    ("sim", "table", "tutti-13 --table @"),
    ("sim", "scheduler_table", "tutti-13 --scheduler-table @"),
    ("sim", "parameters", "tutti-13 --parameters @"),
    ("sim plan", "table", "l-eval --table @"),
    ("sim plan", "scheduler_table", "l-eval --scheduler-table @"),
    ("sim plan", "parameters", "l-eval --parameters @"),
    ("sim cluster", "table", "l-eval --table @"),
    ("sim cluster", "scheduler_table", "l-eval --scheduler-table @"),
    ("sim cluster", "parameters", "l-eval --parameters @"),
    ("serve", "config", "--config @"),
    ("ctl", "socket", "--socket @ status"),
    ("ctl", "token_file", "--address 127.0.0.1:1 --token-file @ status"),
    ("ctl hints", "file", "--socket /no/such hints @"),
];

/// Collects all arguments that name a file or a directory, by their type or their value's name.
fn arguments(command: &clap::Command, path: &str, found: &mut Vec<(String, String)>) {
    let of_path = ValueParser::path_buf().type_id();
    let names_file = |arg: &&clap::Arg| {
        let names = arg.get_value_names().unwrap_or_default();
        let said =
            names.iter().any(|name| ["FILE", "PATH", "DIR"].iter().any(|it| name.contains(it)));
        arg.get_action().takes_values() && (said || arg.get_value_parser().type_id() == of_path)
    };
    let own = command.get_arguments().filter(names_file);
    found.extend(own.map(|arg| (path.to_owned(), arg.get_id().to_string())));
    for inner in command.get_subcommands() {
        let name = format!("{path} {}", inner.get_name());
        arguments(inner, name.trim_start(), found);
    }
}

/// Waits for the process, and kills it if it takes too much time or memory.
fn watch(mut child: Child, line: &str) -> Output {
    let start = Instant::now();
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    while child.try_wait().unwrap().is_none() {
        let status = fs::read_to_string(&status).unwrap_or_default();
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
        let most = most.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10;
        let why = match start.elapsed() > WATCHDOG {
            true => Some("it waits"),
            false => (most > RSS_BYTES_MAX).then_some("it reads without a limit"),
        };
        if let Some(why) = why {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{line}: {why}, with {most} bytes of memory");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn start(line: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Checks that it exits with 2 and prints an error, which is returned.
fn refused(line: &str) -> String {
    let output = watch(start(line), line);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}: {}\n{error}", text(&output.stdout));
    assert!(error.starts_with("error: "), "{line}: {error}");
    error
}

/// Makes files that no command can use as input: name and path.
fn wrong_files(place: &Path) -> Vec<(&'static str, PathBuf)> {
    let [directory, fifo, line] = ["directory", "fifo", "line"].map(|name| place.join(name));
    fs::create_dir(&directory).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap();
    fs::File::create(&line).unwrap().set_len(1 << 30).unwrap();
    vec![("directory", directory), ("fifo", fifo), ("line", line), ("zero", "/dev/zero".into())]
}

#[test]
fn no_file_argument_waits_or_reads_without_a_limit() {
    let mut all = Vec::new();
    arguments(&ripieno::command(), "", &mut all);
    let known = |(path, id): &(String, String)| {
        ARGUMENTS.iter().any(|(command, arg, _)| command == path && arg == id)
    };
    let missing: Vec<_> = all.iter().filter(|it| !known(it)).collect();
    assert!(missing.is_empty() && all.len() == ARGUMENTS.len(), "not in the table: {missing:?}");
    let place = Place::new();
    place.run(FORMAT, 0);
    let (empty, times) = (place.path().join("empty"), place.path().join("times"));
    fs::create_dir(&empty).unwrap();
    let head = r#"{"ripieno_layer_times":1,"model":"m","gpu":"g","engine":"e"}"#;
    fs::write(&times, format!("{head}\n{{\"requests\":[[9,9]],\"layer_us\":9}}\n")).unwrap();
    for (kind, file) in wrong_files(place.path()) {
        for (command, arg, words) in ARGUMENTS {
            if kind == "directory" && ["path", "dir"].contains(arg) {
                continue;
            }
            // A regular file is a valid place for results.
            if kind == "line" && *arg == "html" {
                continue;
            }
            let line = words
                .replace('%', &place.store_dir().display().to_string())
                .replace('+', &empty.display().to_string())
                .replace('=', &times.display().to_string())
                .replace('@', &file.display().to_string());
            refused(&format!("{command} {line}"));
        }
    }
}

/// An unusable file replaces the parameters or the lock.
#[test]
fn a_home_with_something_else_in_it_is_refused() {
    let place = Place::new();
    place.run(FORMAT, 0);
    for name in ["home.json", "lock"] {
        let path = place.store_dir().join(name);
        let spare = place.path().join(name);
        fs::rename(&path, &spare).unwrap();
        let scratch = tempfile::tempdir_in(place.path()).unwrap();
        for (kind, file) in wrong_files(scratch.path()) {
            // The lock is not read before it is locked, and a regular file can be locked.
            if name == "lock" && kind == "line" {
                continue;
            }
            std::os::unix::fs::symlink(&file, &path).unwrap();
            let error = refused(&format!("inspect --path {}", place.store_dir().display()));
            assert!(error.contains(name), "{kind}: {error}");
            fs::remove_file(&path).unwrap();
        }
        fs::rename(&spare, &path).unwrap();
    }
    place.run("inspect", 0);
}

#[test]
fn files_for_results_are_checked_before_anything_else() {
    for (line, wanted) in [
        // The drive does not exist either, which is reported later, when it is opened.
        (
            "bench table --devices vfio:ffff:ff:1f.7 --out /no/such/x",
            "--out /no/such/x: it cannot be",
        ),
        ("sim /no/such.jsonl --html /no/such/x", "--html /no/such/x: it cannot be"),
        ("sim plan /no/such.jsonl --html /no/such/x", "--html /no/such/x: it cannot be"),
        ("pace --slack /no/such/x", "--slack /no/such/x: it cannot be"),
    ] {
        let error = refused(line);
        assert!(error.contains(wanted) && error.contains("\n hint: "), "{line}: {error}");
    }
    // An existing table of another model.
    let directory = tempfile::tempdir().unwrap();
    let table = directory.path().join("table");
    let written =
        format!("bench table --pace --model mini --pool-blocks 64 --out {}", table.display());
    let output = watch(start(&written), &written);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let other = format!("bench table --devices vfio:ffff:ff:1f.7 --out {}", table.display());
    let error = refused(&other);
    assert!(
        error.contains(&format!("--out {}: it is of mini on none", table.display())),
        "{error}"
    );
    let error = refused(&format!("pace --devices 3 --slack {}", table.display()));
    let drives =
        "of the drives [Ripieno software controller, Ripieno software controller], and not";
    assert!(error.contains(drives), "{error}");
}

#[test]
fn a_command_is_not_taken_for_a_directory_of_pages() {
    assert!(refused("man serve").contains("ripieno serve --help"));
    assert!(!Path::new("serve").exists());
}

#[test]
fn a_trace_comes_from_a_pipe_and_a_compressed_one_is_told_how() {
    let request = r#"{"timestamp":1,"input_length":512,"output_length":1,"hash_ids":[1]}"#;
    for line in ["replay --model tiny --trace - --json", "sim - --json", "sim plan - --json"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        command.args(line.split_whitespace()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(format!("{request}\n{request}\n").as_bytes()).unwrap();
        drop(stdin);
        let output = watch(child, line);
        assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains(['{', '[']), "{line}");
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"\x1f\x8b\x08\x00").unwrap();
    for command in ["replay --trace", "sim", "sim plan"] {
        let error = refused(&format!("{command} {}", file.path().display()));
        assert!(error.contains("it is compressed") && error.contains("hint: pipe it: zcat /"));
    }
}
