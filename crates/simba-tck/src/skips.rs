//! Records which cases were skipped, and why: a case that checks nothing must not count as passed.

use std::cell::Cell;
use std::fs::OpenOptions;
use std::future::Future;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::Case;

/// The variable with the file to which every skipped case appends a line. Test programs capture what tests print,
/// and run in parallel; lines in a file can be counted.
const FILE: &str = "SIMBA_TCK_SKIPS";

tokio::task_local! {
    static REASON: Cell<Option<&'static str>>;
}

/// Runs a case. Returns the reason if it skipped itself.
pub(crate) async fn observe(case: impl Future<Output = ()>) -> Option<&'static str> {
    let watched = async {
        case.await;
        REASON.with(Cell::take)
    };
    REASON.scope(Cell::new(None), watched).await
}

/// Marks the running case as skipped, because the store cannot do what it checks.
pub(crate) fn skip(reason: &'static str) {
    // Does nothing outside a case.
    let _ = REASON.try_with(|cell| cell.set(Some(reason)));
}

/// Appends a line to the file that [`FILE`] names, if it is set.
///
/// # Panics
///
/// If the file cannot be written: the count would be wrong.
pub(crate) fn record(case: &Case, reason: &str) {
    let Some(path) = std::env::var_os(FILE) else { return };
    let line = format!("{} {case:?}: {reason}\n", program());
    let file = OpenOptions::new().create(true).append(true).open(&path);
    // One write, so that lines of other programs do not mix with it.
    let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|error| panic!("cannot write to {path:?}, the value of {FILE}: {error}"));
}

/// Returns the name of this program, with the name of its package if Cargo provides it: most are called `tck`.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let package = package.as_deref().and_then(Path::file_name).map(|name| format!("{}/", name.display()));
    package.unwrap_or_default() + &without_hash(&path)
}

/// Returns the name of a program without the hash that Cargo adds to it.
fn without_hash(path: &Path) -> String {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    match name.rsplit_once('-') {
        Some((name, hash)) if hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            name.into()
        }
        _ => name.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reason_belongs_to_the_case_that_gives_it() {
        assert_eq!(observe(async { skip("no reason") }).await, Some("no reason"));
        let (one, other) = tokio::join!(observe(async { skip("one") }), observe(async {}));
        assert_eq!((one, other), (Some("one"), None));
        skip("outside a case");
        assert_eq!(observe(async {}).await, None);
    }

    #[test]
    fn hash_of_cargo_is_removed_from_the_name() {
        for (path, name) in [
            ("/t/deps/tck-17226f40b04fbb2c", "tck"),
            ("/t/deps/with-dash-17226f40b04fbb2c", "with-dash"),
            ("/usr/bin/simba", "simba"),
            ("/t/deps/tck-17226f40b04fbb2x", "tck-17226f40b04fbb2x"),
        ] {
            assert_eq!(without_hash(Path::new(path)), name);
        }
    }
}
