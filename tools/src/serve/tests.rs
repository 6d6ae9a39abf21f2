use super::*;

const GOOD: &str = r#"
socket = "/run/ripieno/ripieno.sock"
users = [1001]
clients = 8
pool_max = "2GiB"

[[limit]]
user = 1001
bandwidth = "1GiB"

[store]
path = "/var/lib/ripieno/store"
capacity = "100GiB"
devices = 2

[shape]
layers = 32
segments = 2
object_bytes = 32768
block_tokens = 16
"#;

fn plan(text: &str) -> Result<Plan, Problem> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ripieno.toml");
    std::fs::write(&path, text).unwrap();
    Plan::read(&path)
}

#[test]
fn a_configuration_is_taken_as_it_is() {
    let options = plan(GOOD).unwrap().options;
    let ServerOptions { socket, users, sessions_max, pool_bytes_max, bandwidth } = options;
    assert_eq!(socket, Path::new("/run/ripieno/ripieno.sock"));
    assert_eq!((users, sessions_max, pool_bytes_max), (vec![1001], 8, 2 << 30));
    assert_eq!(bandwidth, BTreeMap::from([(1001, NonZeroU64::new(1 << 30).unwrap())]));
    let short = GOOD.replace("users = [1001]\nclients = 8\npool_max = \"2GiB\"\n", "");
    let ServerOptions { users, sessions_max, .. } = plan(&short).unwrap().options;
    assert_eq!((users, sessions_max), (Vec::new(), 64), "only the own user");
}

#[test]
fn the_shipped_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../objstore/serve/systemd/ripieno.toml");
    let ServerOptions { socket, .. } = Plan::read(&path).unwrap().options;
    assert_eq!(socket, Path::new("/run/ripieno/ripieno.sock"), "the unit's directory");
}

#[test]
fn a_wrong_configuration_is_named() {
    for (from, to, why) in [
        ("clients = 8", "clients = 0", "at least one"),
        ("clients = 8", "client = 8", "client"),
        ("\"2GiB\"", "\"2 apples\"", "pool_max"),
        ("\"100GiB\"", "\"\"", "capacity"),
        ("\"1GiB\"", "\"0\"", "more than 0 bytes"),
        ("layers = 32", "layers = 0", "shape"),
        ("[shape]", "[shapes]", "shape"),
        ("users = [1001]", "users = [\"alice\"]", "users"),
    ] {
        let error = plan(&GOOD.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("ripieno.toml"), "{to}: {error}");
    }
    let missing = Plan::read(Path::new("/nowhere/ripieno.toml")).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/ripieno.toml"), "{missing}");
}
