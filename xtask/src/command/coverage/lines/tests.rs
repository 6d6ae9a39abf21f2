use super::*;

const LIBRARY: &str = "\
mod a;
#[cfg(all(test, not(loom)))]
mod testing;
pub fn f() {
    #[cfg(test)]
    g();
    h();
}

#[cfg(test)]
#[allow(
    unsafe_code,
    reason = \"sample\"
)]
mod tests {
    fn t() {
        f();
    }
}
fn h() {}
";

#[test]
fn items_of_tests_end_where_they_do() {
    assert_eq!(test_items(LIBRARY), [2..=3, 5..=6, 10..=19]);
}

#[test]
fn lines_of_tests_do_not_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        fs::write(&file, text).expect("written");
        file.display().to_string()
    };
    let library = write("lib.rs", LIBRARY);
    let a = write("a.rs", "#[cfg(test)]\nmod tests;\n");
    let not_counted = ["testing.rs", "testing/deep.rs", "a/tests.rs", "a/tests/one.rs"];
    let mut lcov = format!(
        "SF:{library}\nFN:4,f\nDA:4,1\nDA:6,1\nDA:7,3\nDA:16,9\nDA:20,0\nend_of_record\n\
         SF:{a}\nDA:1,0\nend_of_record\n"
    );
    for name in not_counted {
        lcov += &format!("SF:{}\nDA:1,1\nend_of_record\n", write(name, "fn t() {}\n"));
    }
    let files = without_tests(of_lcov(&lcov)).expect("all files are there");
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(files[Path::new(&library)], Lines { lines: 3, covered: 2 });
}
