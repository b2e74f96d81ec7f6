//! Where the packages put Curator, for programs of the other kind.

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

/// What `java` and `javac` need to find Curator, and the classes in `dir`. The packages come with ZooKeeper's.
#[must_use]
pub fn curator_classpath(dir: &Path) -> String {
    let jars = JARS.iter().map(|jar| format!("/usr/share/java/{jar}.jar"));
    jars.chain([dir.display().to_string()]).collect::<Vec<_>>().join(":")
}
