//! Finds Curator, for contenders that use it.

use std::path::Path;

const JARS: &[&str] = &[
    "curator-client",
    "curator-framework",
    "curator-recipes",
    "guava",
    "failureaccess",
    "zookeeper",
    "zookeeper-jute",
    "slf4j-api",
    "slf4j-nop",
];

/// Returns a class path for `java` and `javac` with Curator and the classes in `dir`. The packages come with
/// ZooKeeper's.
#[must_use]
pub fn curator_classpath(dir: &Path) -> String {
    let jars = JARS.iter().map(|jar| format!("/usr/share/java/{jar}.jar"));
    jars.chain([dir.display().to_string()]).collect::<Vec<_>>().join(":")
}
