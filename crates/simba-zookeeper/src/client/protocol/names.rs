//! The names of a node's children.

/// Names in one allocation: a queue may have thousands of them, and each hand-over lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    text: String,
    /// The end of each name in `text`.
    ends: Vec<usize>,
}

impl Names {
    /// Creates an empty list with capacity for `count` names of `bytes` bytes in total.
    pub(crate) fn with_capacity(bytes: usize, count: usize) -> Self {
        Self { text: String::with_capacity(bytes), ends: Vec::with_capacity(count) }
    }

    pub(crate) fn push(&mut self, name: &str) {
        self.text.push_str(name);
        self.ends.push(self.text.len());
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins.zip(&self.ends).map(|(begin, end)| &self.text[begin..*end])
    }
}

impl<'a> FromIterator<&'a str> for Names {
    fn from_iter<T: IntoIterator<Item = &'a str>>(all: T) -> Self {
        let mut names = Self::default();
        all.into_iter().for_each(|name| names.push(name));
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iter_returns_the_collected_names() {
        for all in [&[][..], &[""], &["a"], &["", "latch-1", "", "ü", ""]] {
            let names: Names = all.iter().copied().collect();
            assert_eq!(names.iter().collect::<Vec<_>>(), all);
            assert_eq!((names.len(), names.is_empty()), (all.len(), all.is_empty()));
        }
    }
}
