//! Methods that only call the method of the same name on a field.

/// Writes public getters that call the method of the same name on a field.
macro_rules! delegate {
    ($field:ident { $($(#[$doc:meta])* fn $name:ident(&self) -> $output:ty;)* }) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(&self) -> $output {
                self.$field.$name()
            }
        )*
    };
}

/// Writes public setters of a wrapper that call the setter of the same name on `inner`.
macro_rules! delegate_setters {
    ($($(#[$doc:meta])* fn $name:ident(self, $argument:ident: $type:ty);)*) => {
        $(
            $(#[$doc])*
            pub fn $name(self, $argument: $type) -> Self {
                Self { inner: self.inner.$name($argument), ..self }
            }
        )*
    };
}

pub(crate) use {delegate, delegate_setters};
