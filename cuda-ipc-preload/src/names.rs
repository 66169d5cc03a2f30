//! The driver functions that are interposed, by their exported names.

/// Calls `$with!` with every interposed name.
macro_rules! for_each_name {
    ($with:ident) => {
        $with! {
            cuMemGetAddressRange_v2
            cuPointerGetAttribute
            cuPointerGetAttributes
            cuMemRetainAllocationHandle
            cuMemGetAllocationPropertiesFromHandle
            cuMemExportToShareableHandle
            cuMemImportFromShareableHandle
            cuMemRelease
            cuMemAddressReserve
            cuMemAddressFree
            cuMemMap
            cuMemSetAccess
            cuMemUnmap
            cuMemFree_v2
            cuMemFreeAsync
            cuMemPoolExportToShareableHandle
            cuMemPoolExportPointer
            cuMemPoolImportFromShareableHandle
            cuMemPoolImportPointer
            cuMemPoolSetAccess
            cuMemPoolDestroy
            cuDeviceGetUuid
            cuDeviceGetUuid_v2
            cuStreamDestroy_v2
            cuMemcpyDtoDAsync_v2
            cuMemcpyAsync
            cuMemcpyBatchAsync
            cuMemcpyBatchAsync_v2
        }
    };
}
pub(crate) use for_each_name;

macro_rules! define {
    ($($name:ident)*) => {
        /// An interposed function.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        #[allow(non_camel_case_types, reason = "the driver's names")]
        pub(crate) enum Name {
            $($name,)*
        }

        impl Name {
            /// All of them, in the order of their numbers.
            pub(crate) const ALL: &'static [Name] = &[$(Name::$name,)*];

            /// The exported symbol.
            pub(crate) const fn symbol(self) -> &'static core::ffi::CStr {
                match self {
                    $(Name::$name => {
                        // SAFETY-free: a C string literal is made at compile time.
                        const SYMBOL: &core::ffi::CStr = match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(symbol) => symbol,
                            Err(_) => panic!("a name without NUL"),
                        };
                        SYMBOL
                    })*
                }
            }
        }
    };
}
for_each_name!(define);

/// How many there are.
pub(crate) const COUNT: usize = Name::ALL.len();
